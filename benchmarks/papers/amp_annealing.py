"""Simulated annealing over placements (AMP section 6.3, Algorithm 2): the devices as a mesh, tiled with dominoes.

Rows of the mesh are nodes, so neighbours in a row have the fast links.  A domino is one pipeline stage, ``dp x tmp`` devices; its
tensor-parallel groups lie along its rows or along its columns::

    4 x 4 devices, dp = 2, tmp = 2 (pp = 4)            dp = 4, tmp = 1, one domino lying, three standing
      A A | B B                                          A A A A
      A A | B B                                          B C D .
      ----+----                                          B C D .      (not a tiling yet: the rest cannot be covered,
      C C | D D                                          B C D .       so another orientation is tried)
"""
from __future__ import annotations

import math
import random
from typing import List, Optional, Tuple

import numpy

from whale_tf.planner.amp.cost import AmpCosts, Degrees
from whale_tf.planner.amp.placement import megatron
from whale_tf.planner.amp.search import Estimated, degrees, micro_batches, ranked

ITERATIONS = 200
COOLING = 0.97
MAX_TILES_TRIED = 2000


def anneal(costs: AmpCosts, iterations: int = ITERATIONS, seed: int = 0) -> List[Estimated]:
    """Accepted strategies, best first.  The neighbour of a strategy differs in ``dp`` or in ``tmp``, and has a new tiling and
    micro-batch; temperatures start at the first cost and cool geometrically.

    Args:
        seed: of every random choice; the same seed gives the same strategies.
    """
    generator = random.Random(seed)
    granularity = costs.profile.batch_granularity or 1
    every = [d for d in degrees(costs.profile, costs.cluster) if micro_batches(costs.global_batch, d.dp, granularity)]
    if not every:
        return []
    current = _sampled(costs, every[0], generator)
    if current is None:
        return []
    record, temperature = [current], current.estimate.seconds
    for _ in range(iterations):
        temperature *= COOLING
        here = current.strategy.degrees
        vary_tmp = generator.random() < 0.5
        near = [d for d in every if (d.dp == here.dp if vary_tmp else d.tmp == here.tmp)]
        following = _sampled(costs, generator.choice(near), generator)
        if following is None:
            continue
        worse = following.estimate.seconds - current.estimate.seconds
        if generator.random() < math.exp(-max(0.0, worse) / temperature):
            current = following
            record.append(current)
    return ranked(record)


def _sampled(costs: AmpCosts, degree: Degrees, generator: random.Random) -> Optional[Estimated]:
    """A random tiling and micro-batch of these degrees, layers assigned exactly."""
    size = generator.choice(micro_batches(costs.global_batch, degree.dp, costs.profile.batch_granularity or 1))
    strategy = costs.assign(degree, size, domino_placement(costs, degree, generator))
    return None if strategy is None else Estimated(strategy, costs.estimate(strategy))


def domino_placement(costs: AmpCosts, degree: Degrees, generator: random.Random) -> numpy.ndarray:
    """``[pp, dp, tmp]`` from a random tiling; Megatron's placement where the nodes make no mesh or no tiling was found."""
    nodes = costs.cluster.nodes
    if len({len(node) for node in nodes}) > 1:
        return megatron(costs.cluster, degree)
    mesh = numpy.array(nodes)
    tiles = tile(mesh.shape[0], mesh.shape[1], degree.dp, degree.tmp, generator)
    if tiles is None:
        return megatron(costs.cluster, degree)
    stages = []
    for row, column, height, width in tiles:
        block = mesh[row:row + height, column:column + width]
        along_rows = (height, width) == (degree.dp, degree.tmp)
        stages.append(block if along_rows else block.T)
    return numpy.array(stages)


_Tile = Tuple[int, int, int, int]  # row, column, height, width


def tile(rows: int, columns: int, dp: int, tmp: int, generator: random.Random) -> Optional[List[_Tile]]:
    """A random tiling of a ``rows x columns`` mesh with ``dp x tmp`` dominoes, each lying or standing, from the top left; None
    when none was found."""
    free = numpy.ones((rows, columns), dtype=bool)
    placed: List[_Tile] = []
    tried = 0

    def cover() -> bool:
        nonlocal tried
        tried += 1
        if tried > MAX_TILES_TRIED:
            return False
        cells = numpy.argwhere(free)
        if not len(cells):
            return True
        row, column = int(cells[0][0]), int(cells[0][1])
        shapes = [(dp, tmp), (tmp, dp)] if dp != tmp else [(dp, tmp)]
        generator.shuffle(shapes)
        for height, width in shapes:
            if row + height <= rows and column + width <= columns and free[row:row + height, column:column + width].all():
                free[row:row + height, column:column + width] = False
                placed.append((row, column, height, width))
                if cover():
                    return True
                placed.pop()
                free[row:row + height, column:column + width] = True
        return False

    return placed if cover() else None
