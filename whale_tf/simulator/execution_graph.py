"""The distributed execution graph: a program unfolded over devices and micro-batches (Proteus section V).

Tasks are numbered block by block in the order of each stage's schedule.  A stage's blocks follow each other on its devices,
which is the schedule's control dependency; there are ``begin`` tasks without duration between them::

    stage 0   begin F0 ... | begin F1 ... | begin B0 ... | begin F2 ... | ... | begin update ...
                    \\ send                      / send
    stage 1          begin F0 ... | begin B0 ...
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

from whale_tf.errors import PlanError
from whale_tf.schedule import check_warmups, orders, positions_of, schedule_of
from whale_tf.simulator.buffers import BufferRows, BufferTable, is_per_step, joined
from whale_tf.simulator.collapse import Collapse, Entry
from whale_tf.simulator.instructions import (
    BACKWARD,
    COMPUTATION,
    FORWARD,
    GRADIENT,
    UPDATE,
    WEIGHT,
    BlockKey,
    DeviceClasses,
    Instruction,
    Instructions,
)
from whale_tf.simulator.network import Algorithm, Network
from whale_tf.simulator.strategy_tree import CompleteStrategy
from whale_tf.simulator.transformation import Group

LinkUse = Tuple[int, float, int]  # link, bytes per second that one communication takes alone, how many there are


class ExecutionGraph(NamedTuple):
    """Tasks and everything that the engine needs to run them; all sequences are indexed by task unless otherwise stated.

    Attributes:
        seconds: time that each task takes alone.
        lane: COMPUTATION, FEATURE or GRADIENT; -1 for ``begin`` tasks.
        instruction: number in ``Instructions.instructions``; -1 for ``begin`` tasks.
        micro_batch: -1 for the update.
        slots: places in ``devices`` of the devices that a task occupies.
        queues: communication queues that a task occupies (see :func:`queue_of`).
        links: the links that a communication uses, and how much of them.
        successors, first_successor: tasks that wait for task ``t`` are ``successors[first_successor[t]:...[t + 1]]``.
        waits_for: number of tasks for which each task waits.
        devices: the simulated devices.
        blocks: (stage, phase) -> number of the first task of every micro-batch's block, and how many tasks it has.
        buffers: see :class:`whale_tf.simulator.buffers.BufferTable`.
    """

    seconds: List[float]
    lane: List[int]
    instruction: List[int]
    micro_batch: List[int]
    slots: List[Tuple[int, ...]]
    queues: Dict[int, Tuple[int, ...]]
    links: Dict[int, Tuple[LinkUse, ...]]
    successors: List[int]
    first_successor: List[int]
    waits_for: List[int]
    devices: Tuple[int, ...]
    blocks: Dict[BlockKey, Tuple[np.ndarray, int]]
    buffers: BufferTable


QUEUES_PER_DEVICE = 3  # feature communication out, feature communication in, gradient communication
OF_EXAMPLES = ("activations", "gradients of activations")  # categories of buffers whose sizes follow the examples


def queue_of(slot: int, lane: int, incoming: bool = False) -> int:
    """The queue of a communication.  Links are full duplex, so a device can send one tensor and receive another at the same time;
    collectives do both."""
    return slot * QUEUES_PER_DEVICE + (2 if lane == 2 else 1 if incoming else 0)


class _Template:
    """One block for one micro-batch: its tasks, numbered from 0, beginning with the ``begin`` tasks of the stage's devices."""

    def __init__(self, key: BlockKey, slots: Sequence[int]) -> None:
        self.key = key
        self.slots = list(slots)
        self.instruction: List[int] = [-1] * len(slots)
        self.lane: List[int] = [-1] * len(slots)
        self.seconds: List[float] = [0.0] * len(slots)
        self.sums: Dict[int, float] = {}  # task -> additional time after the first micro-batch
        self.task_slots: List[Tuple[int, ...]] = [(slot,) for slot in slots]
        self.queues: Dict[int, Tuple[int, ...]] = {}
        self.links: Dict[int, Tuple[LinkUse, ...]] = {}
        self.edges: List[Tuple[int, int]] = []
        self.crossing: List[Tuple[BlockKey, int, int]] = []  # (other block, its task, task here)
        self.last: Dict[int, int] = {slot: number for number, slot in enumerate(slots)}

    def __len__(self) -> int:
        return len(self.instruction)


class _Channel(NamedTuple):
    """A simulated group of a kind of communication, which many instructions use.

    Attributes:
        devices, slots: of the simulated devices that stand for its members.
        loads: for each algorithm, the load of the group's whole class on the simulated links.
    """

    algorithms: Tuple[Algorithm, ...]
    devices: Tuple[int, ...]
    slots: Tuple[int, ...]
    queues: Tuple[int, ...]
    loads: Tuple[Tuple[Entry, ...], ...]


class Unfolder:
    """Tasks of one program on the devices that ``collapse`` keeps, block by block; :meth:`unfold` repeats the blocks."""

    def __init__(self, program: Instructions, collapse: Collapse, network: Network) -> None:
        self.program, self.collapse, self.network = program, collapse, network
        self.slot_of = {device: slot for slot, device in enumerate(collapse.kept)}
        self.task_of: Dict[int, Dict[int, int]] = {}  # instruction -> simulated device -> local task
        self._channels_of: Dict[Tuple[int, str, int], List[_Channel]] = {}
        self._parts_slots: Dict[int, List[Tuple[int, int, int]]] = {}
        self.templates: Dict[BlockKey, _Template] = {}
        splits = any(instruction.block[1] == WEIGHT for instruction in program.instructions)
        phases = (FORWARD, BACKWARD, WEIGHT, UPDATE) if splits else (FORWARD, BACKWARD, UPDATE)
        for number, stage in enumerate(program.stages):
            slots = [self.slot_of[device] for device in stage if device in self.slot_of]
            for phase in phases:
                self.templates[number, phase] = _Template((number, phase), slots)
        for instruction in program.instructions:
            template = self.templates[instruction.block]
            if instruction.lane == COMPUTATION:
                self._computation(template, instruction)
            else:
                self._communication(template, instruction)

    def _computation(self, template: _Template, instruction: Instruction) -> None:
        rows = self._kept_parts(instruction.parts)
        local = len(template)
        self.task_of[instruction.id] = {device: local + i for i, (device, _, _) in enumerate(rows)}
        template.instruction += [instruction.id] * len(rows)
        template.lane += [COMPUTATION] * len(rows)
        template.seconds += [instruction.seconds[kind] for _, _, kind in rows]
        if instruction.sum_seconds:
            more = (instruction.sum_seconds[kind] for _, _, kind in rows)
            template.sums.update((local + row, seconds) for row, seconds in enumerate(more) if seconds)
        waits = [i for i in instruction.dependencies if self.program.instructions[i].lane != COMPUTATION]
        for device, slot, _ in rows:
            template.task_slots.append((slot,))
            template.edges.append((template.last[slot], local))
            template.last[slot] = local
            for source in waits:
                task = self.task_of[source].get(device)
                if task is not None:
                    self._edge(template, source, task, local)
            local += 1

    def _communication(self, template: _Template, instruction: Instruction) -> None:
        classes = self.collapse.groups(instruction.label, instruction.groups)
        first = len(template)
        self.task_of[instruction.id] = {device: first + number for device, number in classes.of_device.items()}
        for channel in self._channels(instruction.lane, instruction.label, instruction.groups):
            local = len(template)
            costs = [a.latency_s + instruction.size_bytes * a.seconds_per_byte for a in channel.algorithms]
            best = costs.index(min(costs))
            template.instruction.append(instruction.id)
            template.lane.append(instruction.lane)
            template.seconds.append(costs[best])
            template.task_slots.append(channel.slots)
            template.queues[local] = channel.queues
            if costs[best] > 0:
                per_second = instruction.size_bytes / costs[best]
                template.links[local] = tuple((link, load * per_second, count) for link, load, count in channel.loads[best])
            tasks = {(source, task) for source in instruction.dependencies for device in channel.devices
                     for task in [self.task_of[source].get(device)] if task is not None}
            for source, task in sorted(tasks):
                self._edge(template, source, task, local)
            # a feature communication belongs to its block; gradients are sent as soon as they are ready
            if not any(instruction.lane == GRADIENT or self.program.instructions[source].block == template.key
                       for source, _ in tasks):
                begins = {slot: task for task, slot in enumerate(template.slots)}
                template.edges += [(begins[slot], local) for slot in channel.slots if slot in begins]

    def _channels(self, lane: int, label: str, groups: Tuple[Group, ...]) -> List[_Channel]:
        """The simulated groups of a communication, in order."""
        key = (lane, label, id(groups))
        if key not in self._channels_of:
            classes, representative = self.collapse.groups(label, groups), self.collapse.representative
            found = self._channels_of[key] = []
            for position, number in enumerate(classes.kept):
                group = groups[number]
                devices = tuple(sorted({representative[device] for device in group.devices}))
                found.append(_Channel(
                    self.network.algorithms_of(label, group), devices, tuple([self.slot_of[device] for device in devices]),
                    self._queues(lane, group.pairs, devices), classes.entries[position]))
        return self._channels_of[key]

    def _queues(self, lane: int, pairs: Sequence[Tuple[int, int, float]], devices: Sequence[int]) -> Tuple[int, ...]:
        if not pairs:
            queues = [queue_of(self.slot_of[device], lane) for device in devices]
            if lane == 1:
                queues += [queue_of(self.slot_of[device], lane, incoming=True) for device in devices]
            return tuple(sorted(queues))
        representative = self.collapse.representative
        sending = {queue_of(self.slot_of[representative[a]], lane) for a, _, _ in pairs}
        receiving = {queue_of(self.slot_of[representative[b]], lane, incoming=True) for _, b, _ in pairs}
        return tuple(sorted(sending | receiving))

    def _edge(self, template: _Template, source: int, task: int, local: int) -> None:
        block = self.program.instructions[source].block
        if block == template.key:
            template.edges.append((task, local))
        else:
            template.crossing.append((block, task, local))

    def _kept_parts(self, parts: DeviceClasses) -> List[Tuple[int, int, int]]:
        """(device, slot, class) of the simulated devices in a config."""
        found = self._parts_slots.get(id(parts))
        if found is None:
            found = self._parts_slots[id(parts)] = [
                (device, self.slot_of[device], kind) for device, kind in zip(parts.devices, parts.kind) if device in self.slot_of]
        return found

    # ---- over micro-batches -----------------------------------------------------------------------------------------

    def unfold(self, strategy: CompleteStrategy) -> ExecutionGraph:
        """All micro-batches of ``strategy``, whose schedule, warm-up and number of micro-batches may differ from the program's.

        Raises:
            PlanError: the stages' warm-up depths do not fit together.
        """
        warmups = [stage.warmup for stage in strategy.stages]
        if strategy.schedule == "backward_first":
            check_warmups(warmups, strategy.num_micro_batch)
        offsets: Dict[BlockKey, np.ndarray] = {
            key: np.zeros(1 if key[1] == UPDATE else strategy.num_micro_batch, np.int64) for key in self.templates}
        order: List[Tuple[BlockKey, int]] = []
        total = 0
        chains: List[List[Tuple[BlockKey, int]]] = []
        last: Dict[BlockKey, int] = {}  # block -> its last micro-batch
        positions = stage_positions(strategy)
        for position, steps in enumerate(orders(strategy.schedule, strategy.num_micro_batch, warmups, positions)):
            chain: List[Tuple[BlockKey, int]] = [  # without gradients of weights, if no layer has any
                (key, step.micro_batch) for step in steps for key in [(step.task_graph, step.kind)] if key in self.templates]
            last.update(chain)
            chain += [((number, UPDATE), 0) for number, own in enumerate(positions) if own == position]
            for key, micro_batch in chain:
                offsets[key][micro_batch] = total
                total += len(self.templates[key])
            order += chain
            chains.append(chain)
        sources, targets = self._edges(offsets, chains, last)
        by_source = np.argsort(sources, kind="stable")
        first = np.zeros(total + 1, np.int64)
        np.cumsum(np.bincount(sources, minlength=total), out=first[1:])
        return ExecutionGraph(
            *self._repeat(order, strategy), *self._per_communication(order, offsets), targets[by_source].tolist(), first.tolist(),
            np.bincount(targets, minlength=total).tolist(), self.collapse.kept,
            {key: (offsets[key], len(template)) for key, template in self.templates.items()},
            self._buffers(offsets, strategy))

    def _repeat(self, order: Sequence[Tuple[BlockKey, int]], strategy: CompleteStrategy) -> Tuple[List, List, List, List, List]:
        """The seconds, lanes, instructions, micro-batches and slots of all tasks."""
        seconds: List[float] = []
        lane: List[int] = []
        instruction: List[int] = []
        micro_batches: List[int] = []
        slots: List[Tuple[int, ...]] = []
        factors = _micro_batch_factors(strategy)
        begun: Set[BlockKey] = set()
        for key, micro_batch in order:
            template, offset = self.templates[key], len(seconds)
            if factors is None or key[1] == UPDATE:
                seconds += template.seconds
            else:
                seconds += [value * factors[micro_batch] for value in template.seconds]
            if key in begun:
                for task, more in template.sums.items():
                    seconds[offset + task] += more
            begun.add(key)
            lane += template.lane
            instruction += template.instruction
            micro_batches += [-1 if key[1] == UPDATE else micro_batch] * len(template)
            slots += template.task_slots
        return seconds, lane, instruction, micro_batches, slots

    def _edges(self, offsets: Dict[BlockKey, np.ndarray], chains: Sequence[Sequence[Tuple[BlockKey, int]]],
               last: Dict[BlockKey, int]) -> Tuple[np.ndarray, np.ndarray]:
        sources: List[np.ndarray] = []
        targets: List[np.ndarray] = []
        for key, template in self.templates.items():
            here = offsets[key]
            if template.edges:
                pairs = np.array(template.edges, np.int64)
                sources.append((here[:, None] + pairs[:, 0]).ravel())
                targets.append((here[:, None] + pairs[:, 1]).ravel())
            groups: Dict[BlockKey, List[Tuple[int, int]]] = {}
            for block, task, local in template.crossing:
                groups.setdefault(block, []).append((task, local))
            for block, edges in groups.items():
                pairs = np.array(edges, np.int64)
                there = offsets[block]
                if key[1] == UPDATE and block[1] != UPDATE:
                    there = there[last[block] : last[block] + 1]
                elif key[1] != UPDATE and block[1] == UPDATE:
                    there = np.repeat(there, len(here))  # once a step, for all micro-batches
                sources.append((there[:, None] + pairs[:, 0]).ravel())
                targets.append((here[:, None] + pairs[:, 1]).ravel())
        for chain in chains:
            for (key, micro_batch), (next_key, next_micro_batch) in zip(chain, chain[1:]):
                template, following = self.templates[key], self.templates[next_key]
                ends = np.array([template.last[slot] for slot in following.slots], np.int64)
                sources.append(offsets[key][micro_batch] + ends)
                targets.append(offsets[next_key][next_micro_batch] + np.arange(len(ends)))
        return np.concatenate(sources), np.concatenate(targets)

    def _per_communication(
        self, order: Sequence[Tuple[BlockKey, int]], offsets: Dict[BlockKey, np.ndarray]
    ) -> Tuple[Dict[int, Tuple[int, ...]], Dict[int, Tuple[LinkUse, ...]]]:
        queues: Dict[int, Tuple[int, ...]] = {}
        links: Dict[int, Tuple[LinkUse, ...]] = {}
        for key, micro_batch in order:
            offset, template = int(offsets[key][micro_batch]), self.templates[key]
            for local, value in template.queues.items():
                queues[offset + local] = value
            for local, use in template.links.items():
                links[offset + local] = use
        return queues, links

    def _buffers(self, offsets: Dict[BlockKey, np.ndarray], strategy: CompleteStrategy) -> BufferTable:
        """All buffers, with the tasks that write and read them."""
        instructions, factors = self.program.instructions, _micro_batch_factors(strategy)
        readers: List[List[int]] = [[] for _ in self.program.buffers]
        for instruction in instructions:
            for read in instruction.reads:
                if read >= 0:
                    readers[read].append(instruction.id)
        per_micro_batch, per_step = BufferRows(), BufferRows()
        for number, buffer in enumerate(self.program.buffers):
            block = instructions[buffer.producer].block
            table = per_step if is_per_step(block) else per_micro_batch
            for device, slot, kind in self._kept_parts(buffer.parts):
                producer = self.task_of[buffer.producer].get(device)
                if producer is None or buffer.bytes[kind] <= 0.0:
                    continue
                row = table.add(slot, buffer.bytes[kind], number, block, producer)
                for reader in readers[number]:
                    task = self.task_of[reader].get(device)
                    if task is not None:
                        table.read(row, instructions[reader].block, task)
        found = per_micro_batch.unfold(offsets, strategy.num_micro_batch)
        if factors is not None:
            follow = [self.program.buffers[number].category in OF_EXAMPLES for _, _, number in per_micro_batch.rows]
            found = found._replace(bytes=found.bytes * np.where(follow, np.array(factors)[:, None], 1.0).ravel())
        return joined(found, per_step.unfold(offsets, 1))


def stage_positions(strategy: CompleteStrategy) -> Tuple[int, ...]:
    """The position of each stage in the pipeline; stages on the same devices have the same position.

    Raises:
        PlanError: the schedule runs several stages at each position, but the strategy has one at each.
    """
    positions = positions_of([stage.devices for stage in strategy.stages])
    if schedule_of(strategy.schedule).folding is not None and max(positions) == len(positions) - 1:
        raise PlanError(
            f"schedule {strategy.schedule!r} runs several TaskGraphs on each device, but this plan has one; use backward_first "
            "or zero_bubble_h1, or a plan with more TaskGraphs than devices")
    return positions


def _micro_batch_factors(strategy: CompleteStrategy) -> Optional[List[float]]:
    """Size of each micro-batch relative to the mean; None if they are equal."""
    slices = strategy.micro_batch_slices
    if slices is None:
        return None
    return [size * len(slices) / float(sum(slices)) for size in slices]
