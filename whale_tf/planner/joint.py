"""Decides partition, schedule, recomputation, ZeRO, offloading and precision together: the fastest plan that fits, in simulation.

The model is a :class:`Playable`: either layers (:mod:`whale_tf.planner.layers`), played by the simulator, or a captured graph
(``whale_tf.decide.played_steps``), whose Programs are played.

A state is a plan of a search (stages, devices, micro-batches) under :class:`Measures`, played.  For every precision and schedule:

1. The search runs once as if devices had unlimited memory.  Under a division (ZeRO and offloading) no plan is faster than the
   fastest of these plans is under that division.  So a division is skipped if that is no faster than a plan that already fits.
2. Divisions are tried in the order of their cost.  If the fastest plan fits as it is, divisions that save more only cost more,
   and are skipped.
3. Otherwise the search runs again under the memory of the division, once keeping everything and once keeping as little as
   possible, and every plan is played.  Its stages recompute the least that makes it fit (:mod:`whale_tf.planner.fitting`).

A plan is not played if a lower bound of its time says that it would be neither taken nor reported.

Plans for a schedule with several stages per device are made from plans with one stage per device
(:mod:`whale_tf.planner.folded`).

The assumptions: saving memory gains no more than :data:`GAIN`, and the plan that is fastest without a limit is among those that
the search returns.
"""

from __future__ import annotations

import abc
import heapq
from dataclasses import replace
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from whale_tf.cluster import Cluster
from whale_tf.errors import InfeasibleError, PlanError, memory_text, seconds_text
from whale_tf.plan import OFFLOAD, ZERO
from whale_tf.planner.candidate import Candidate, Stage, best
from whale_tf.planner.measures import AUTO, SEARCHED, Allowed, Measures, costs_less
from whale_tf.schedule import schedule_of

NEAR = 1.1  # times the time of the fastest plan, a plan may take and still be played to be reported
GAIN = 0.95  # of the time of a plan that saves nothing, a plan that does may take (its updates are divided, gathers hidden)
NEVER_S = float("inf")
HELD_LEAST = Measures(offload="v0")  # the devices hold no state
Progress = Callable[[int, float], None]
LABELS = {
    "recompute": "recomputation", "zero": "ZeRO", "offload": "offloading", "precision": "16 bits", "schedule": "its schedule"}


class TooTight(InfeasibleError):
    """Plans fit as they are played, but not as they are priced in the end.

    Attributes:
        share: the part of a device's memory that the smallest of them could use instead.
    """

    def __init__(self, found: Sequence[Candidate], cluster: Cluster) -> None:
        usable = [device.usable_bytes for device in cluster.devices]
        plans = [one for one in found if not one.why_not]
        shares = [min(room / peak for room, peak in zip(usable, one.peak_memory_bytes) if peak) for one in plans]
        self.share = max(shares, default=0.0)
        least = min((max(one.peak_memory_bytes) for one in plans), default=0)
        if plans:
            text = (f"no plan fits in memory: the smallest of {len(plans)} needs {memory_text(least)} on its fullest device, but "
                    f"the smallest of the {len(cluster)} devices of {cluster.name!r} has room for {memory_text(min(usable))}; "
                    "use larger devices, more of them, or a smaller mini-batch")
        else:
            text = "; ".join(dict.fromkeys(one.why_not for one in found))
        super().__init__(text, least or None)


class Playable(abc.ABC):
    """The model of a joint search.

    Attributes:
        name: name in messages.
        schedules: the schedules to try under ``auto``, the cheapest first.
        again: under one division, the number of fastest plans for which recomputation is tried; more are tried if none fits.
        rooms: parts of a device's memory that a search may use; the next one is used if nothing fits in simulation.
        bounds_hold: whether plans are played with the memory that searches count, so that both lack the same number of bytes.
    """

    name: str
    cluster: Cluster
    schedules: Sequence[str] = SEARCHED
    again: int = 12
    rooms: Sequence[float] = (1.0,)
    bounds_hold = True

    @property
    def whole(self) -> Cluster:
        """The cluster with all of its memory, of which plans may be searched for only a part."""
        return self.cluster

    @abc.abstractmethod
    def precisions(self, allowed: Allowed) -> Tuple[str, ...]:
        """The precisions to try."""

    @abc.abstractmethod
    def search(self, measures: Measures) -> List[Candidate]:
        """Plans with one stage per device.  Raises InfeasibleError."""

    @abc.abstractmethod
    def folded(self, found: Sequence[Candidate], measures: Measures) -> List[Candidate]:
        """Plans for a schedule with several stages per device, made from the plans ``found`` without it."""

    def suits(self, found: Candidate, measures: Measures) -> bool:
        """Whether the plan has as many stages as the schedule requires."""
        return measures.schedule == "backward_first" or len(found.stages) > 1

    @abc.abstractmethod
    def play(self, found: Candidate, measures: Measures) -> Candidate:
        """Plays a plan under measures.  Under ``auto`` it recomputes the least that makes it fit, if anything does."""

    def least_seconds(self, found: Candidate, measures: Measures) -> float:
        """A lower bound of the time of a plan under measures, in simulation."""
        return 0.0

    def least_fitting_seconds(self, found: Candidate, measures: Measures) -> float:
        """A lower bound of the time of a plan that recomputes what does not fit beside its state under measures."""
        return 0.0

    def least_seconds_again(self, plain: Candidate) -> float:
        """The least time of a plan that recomputes what does not fit, nearly; infinite if it cannot fit.

        Args:
            plain: the plan in simulation, without.
        """
        return plain.latency_s

    def is_too_large(self, found: Candidate, measures: Measures) -> bool:
        """Whether a plan does not fit under measures, whatever it recomputes."""
        return False

    def least_seconds_under(self, plain: Candidate, measures: Measures) -> float:
        """The least time of a plan under measures, with what it must recompute to fit, nearly; infinite if it cannot fit.

        Args:
            plain: the plan in simulation, under measures that save less, without recomputation.
        """
        return plain.latency_s

    def settled(self, found: Sequence[Candidate]) -> List[Candidate]:
        """The plans from which to choose, with their final times and memory.  They are those of the simulation, unless what
        plays the plans of a search is only near to what they cost."""
        return list(found)

    def smallest(self, found: Sequence[Candidate]) -> List[Candidate]:
        """Among plans that do not fit, the ones to report, by simulation."""
        return list(found)


class Joint:
    """Searches for one model on one cluster; each runs once.

    Args:
        progress: called after each plan with the number of plans played so far, and the seconds of the fastest one that fits
            (infinite: none).

    Attributes:
        errors: the reasons why searches found nothing, by their measures.
    """

    def __init__(self, model: Playable, progress: Optional[Progress] = None) -> None:
        self.model, self.cluster, self._progress, self._fastest_s = model, model.cluster, progress, NEVER_S
        self._asked: Optional[Allowed] = None
        self.errors: Dict[Measures, InfeasibleError] = {}
        self._searched: Dict[Measures, List[Candidate]] = {}
        self._played: Dict[Tuple[Any, Measures], Tuple[Candidate, Candidate]] = {}  # as it was found, as played

    def best(self, allowed: Allowed, others: Sequence[Candidate] = ()) -> Candidate:
        """The fastest plan that fits, with the step time without each of its measures.

        Args:
            others: played plans of other searches.

        Raises:
            PlanError: a value is not allowed, or there are no replicas over which ZeRO could divide.
            InfeasibleError: nothing fits; the message gives the smallest memory that would suffice.
        """
        allowed.check()
        self._asked = allowed
        is_whole = True
        try:
            own = self.played(allowed)
        except KeyboardInterrupt:
            own, is_whole = [one for (_, measures), (_, one) in self._played.items() if one.fits and allowed.has(measures)], False
            if not own:
                raise
        found = [*others, *own]
        if not any(one.fits for one in found):
            found = self.model.smallest(found)
        if not any(one.fits for one in found):
            self._raise(allowed, found)
        found = self.model.settled(found)
        if not any(one.fits for one in found):
            raise TooTight(found, self.model.whole)
        if others and self.errors and not own:
            found += [Candidate("TaskGraphs", f"TaskGraphs: no candidate: {error}", fits=False, why_not=str(error))
                      for error in list(self.errors.values())[:1]]
        taken = best(found, self.cluster)
        without = [] if is_whole else [f"interrupted: the best of {len(own)} plans so far"]
        try:
            for line in self._without(taken, allowed, others) if is_whole else ():
                without.append(line)
        except KeyboardInterrupt:
            without.append("interrupted: what it takes without its other measures is not known")
        return replace(taken, without=tuple(without))

    def played(self, allowed: Allowed) -> List[Candidate]:
        """Every plan that was played, and the reasons why other searches found none."""
        found: List[Candidate] = []
        for precision in self.model.precisions(allowed):
            for schedule in self.model.schedules if allowed.schedule == AUTO else (allowed.schedule,):
                enough: List[Tuple[str, str]] = []
                for zero, offload in allowed.divisions():
                    if any(costs_less(one, (zero, offload)) for one in enough):
                        continue
                    measures = Measures(allowed.recompute, zero, offload, precision, schedule)
                    quickest_s = min((one.latency_s for one in found if one.fits), default=NEVER_S)
                    more, is_enough = self._division(measures, quickest_s, found)
                    found += more
                    if is_enough:
                        enough.append((zero, offload))
                if allowed.zero == AUTO:
                    found += self._with_zero(found, Measures("none", "v1", "none", precision, schedule))
        planned = {one.search for one in found if not one.why_not}
        found += [one for one in self._find(Measures(is_bounded=False)) if one.why_not]
        return [one for one in found if not one.why_not or one.search not in planned]

    def _with_zero(self, found: Sequence[Candidate], measures: Measures) -> List[Candidate]:
        """The fastest plan that fits without any measure but ZeRO, and data parallelism, under every level of ZeRO: dividing the
        updates can make them faster."""
        bare = measures._replace(zero="none")
        fitting = [one for one in found if one.fits and one.measures._replace(zero="none") == bare and self._suits(one, measures)]
        fastest = sorted(fitting, key=lambda one: one.latency_s)[:1]
        plans = [one for one in self._find(bare._replace(is_bounded=False))
                 if one.kind == "dp" and not one.why_not and self._suits(one, measures) and self._least_s(one, bare) > 0.0]
        fastest += sorted(plans, key=lambda one: self._least_s(one, bare))[:1]
        quickest_s = min((one.latency_s for one in found if one.fits), default=NEVER_S)
        return [self._play(one, under) for one in fastest for under in (bare._replace(zero=level) for level in ZERO[1:])
                if self._least_s(one, under) < quickest_s]

    def _division(self, measures: Measures, quickest_s: float, known: Sequence[Candidate]) -> Tuple[List[Candidate], bool]:
        """The plans played under one division, and whether the fastest fits as it is.

        Args:
            known: what was played before.
        """
        as_is = measures._replace(recompute="none" if measures.recompute == AUTO else measures.recompute)
        if measures.offload != "none" and self._is_late(as_is._replace(offload="none"), quickest_s):
            return [], False
        unlimited = self._find(as_is._replace(zero="none", offload="none", is_bounded=False))
        bare = as_is._replace(recompute="none", zero="none", offload="none")
        suiting = [one for one in unlimited if self._suits(one, measures)]
        if as_is != bare:
            suiting = [one for one in suiting if self._least_s(one, bare) * GAIN < quickest_s
                       and self._play(one, bare).latency_s * GAIN < quickest_s]
        hopeful = [one for one in suiting if not self._is_needless(one, as_is, quickest_s)]
        if suiting and not hopeful and (measures.zero, measures.offload) != ("none", "none"):
            return [], False  # nor are cuts for less memory
        free = self._fast(hopeful, as_is, known)
        fastest = min(free, key=lambda one: one.latency_s, default=None)
        if not suiting or fastest is not None and (fastest.fits or fastest.latency_s >= quickest_s):
            return free, fastest is not None and fastest.fits
        found: List[Candidate] = []
        more = unlimited
        limit_s = min([quickest_s] + [one.latency_s for one in free if one.fits])
        if (measures.zero, measures.offload) == ("none", "none"):
            limit_s *= NEAR
        for room in self.model.rooms:
            stages: List[Candidate] = []
            # cuts found for less memory can be the faster ones even if nothing is recomputed, so all are played either way
            own = measures.recompute.replace(AUTO, "none")
            is_first = quickest_s == NEVER_S or (measures.zero, measures.offload) == ("none", "none")
            for recompute in dict.fromkeys((own, "none", "full", "stage")) if is_first else (own,):
                below_s = limit_s if recompute == "none" else NEVER_S  # others are played with the least recomputation that fits
                stages += self._find(measures._replace(recompute=recompute, room=room, below_s=below_s))
            if stages:
                found += self._bounded(stages + more, measures, quickest_s, [*known, *free, *found])
                more = []
            if any(one.fits for one in found):
                break
        return found or free, False

    def _is_needless(self, found: Candidate, as_is: Measures, quickest_s: float) -> bool:
        """Whether a plan need not be played under measures, because another one is faster: this one fits under measures that save
        less (whether it is faster under ZeRO is asked of the fastest plan alone), is slower without any, or cannot fit."""
        if quickest_s == NEVER_S or found.why_not:
            return False
        gain = GAIN if as_is.offload == "none" else 1.0  # offloading adds copies and slower updates
        for zero in ZERO:
            for offload in OFFLOAD:
                less = as_is._replace(zero=zero, offload=offload)
                if less != as_is and costs_less((zero, offload), (as_is.zero, as_is.offload)):
                    known = self._played.get((_of(found), less))
                    if known is not None and not known[1].why_not and (
                            known[1].fits or self.model.least_seconds_under(known[1], as_is) * gain >= quickest_s):
                        return True
        return self.model.is_too_large(found, as_is) or self._is_hopeless(found, as_is, quickest_s)

    def _is_hopeless(self, found: Candidate, measures: Measures, quickest_s: float) -> bool:
        """Whether a plan must recompute so much under measures that another one is faster."""
        if quickest_s == NEVER_S or found.why_not:
            return False
        return self.model.least_fitting_seconds(found, measures) * GAIN >= quickest_s

    def _is_late(self, measures: Measures, quickest_s: float) -> bool:
        """Whether no plan that was played under measures, with or without a limit, is faster than one that fits, unless it must
        recompute too much.  Then none is with offloading either, which only adds copies and slower updates."""
        if quickest_s == NEVER_S:
            return False
        times = [one.latency_s for (_, under), (_, one) in self._played.items()
                 if under == measures and not one.why_not and not self._is_hopeless(one, HELD_LEAST, quickest_s)]
        return bool(times) and min(times) >= quickest_s

    def _fast(self, plans: Sequence[Candidate], measures: Measures, known: Sequence[Candidate]) -> List[Candidate]:
        """The simulated plans, without those that are too slow to be taken or reported; the fastest one, however slow it is."""
        found: Dict[int, Candidate] = {}
        bounds = [self._least_s(one, measures) for one in plans]
        for place in sorted(range(len(plans)), key=bounds.__getitem__):
            fastest_s = min((one.latency_s for one in found.values()), default=NEVER_S)
            if bounds[place] <= max(fastest_s, _limit_s([*known, *found.values()], plans[place].search, measures)):
                found[place] = self._play(plans[place], measures)
        return [found[place] for place in sorted(found)]

    def _bounded(self, stages: Sequence[Candidate], measures: Measures, quickest_s: float,
                 known: Sequence[Candidate]) -> List[Candidate]:
        """The played plans among those that must respect the devices' memory, fast ones first.  A plan that is too slow to be
        taken or reported is left out without being played."""
        as_is = measures._replace(recompute="none" if measures.recompute == AUTO else measures.recompute)
        plans = [one for one in _distinct(stages) if self._suits(one, measures)]
        waiting: List[Tuple[float, int, Optional[Candidate]]] = [(self._least_s(one, as_is), place, None)
                                                                 for place, one in enumerate(plans)]
        heapq.heapify(waiting)  # by time if everything is kept, or its bound
        found: List[Candidate] = []
        while waiting:
            bound_s, place, plain = heapq.heappop(waiting)
            if plain is None:
                limit_s = _limit_s([*known, *found], plans[place].search, measures)
                own_s = min([quickest_s] + [one.latency_s for one in known if one.fits and one.search == plans[place].search])
                if bound_s <= limit_s and not self._is_needless(plans[place], as_is, own_s):
                    plain = self._play(plans[place], as_is)
                    heapq.heappush(waiting, (plain.latency_s, place, plain))
                continue
            is_late = len(found) >= self.model.again and quickest_s < NEVER_S
            own_s = min([quickest_s] + [one.latency_s for one in known if one.fits and one.search == plain.search])
            is_slow = plain.latency_s >= own_s or is_late  # recomputation is no faster
            if not is_slow and not plain.fits and own_s < NEVER_S and measures.recompute == AUTO:
                is_slow = self.model.least_seconds_again(plain) * GAIN >= own_s
            found.append(plain if is_slow else self._play(plans[place], measures))
            quickest_s = min([quickest_s] + [one.latency_s for one in found[-1:] if one.fits])
        return found

    def _least_s(self, found: Candidate, measures: Measures) -> float:
        return 0.0 if found.why_not else self.model.least_seconds(found, measures)

    def _find(self, measures: Measures) -> List[Candidate]:
        """Searches plans for 1F1B, which other schedules play too.  Plans with several stages per device are made from them."""
        plain = measures._replace(schedule="backward_first")
        wider = [one for one in self._searched if one._replace(below_s=plain.below_s) == plain and one.below_s >= plain.below_s]
        plain = wider[0] if wider else plain
        if not wider:
            try:
                kept = {(one.stages, one.micro_batches, one.why_not): one for one in reversed(self.model.search(plain))}
                self._searched[plain] = list(reversed(list(kept.values())))
            except InfeasibleError as error:
                self._searched[plain], self.errors[plain] = [], error
        if schedule_of(measures.schedule).folding is None:
            return self._searched[plain]
        if measures not in self._searched:
            self._searched[measures] = self.model.folded(self._searched[plain], measures)
        return self._searched[measures]

    def _play(self, found: Candidate, measures: Measures) -> Candidate:
        if found.why_not:
            return found
        key = (_of(found), measures)
        if key not in self._played:
            self._played[key] = found, self.model.play(found, measures)
            if self._progress is not None:
                played = self._played[key][1]
                if played.fits and (self._asked is None or self._asked.has(measures)):
                    self._fastest_s = min(self._fastest_s, played.latency_s)
                self._progress(len(self._played), self._fastest_s)
        first, played = self._played[key]
        if first.search == found.search and first.description == found.description or played.description != first.description:
            return played
        return replace(played, search=found.search, description=found.description)

    def _suits(self, found: Candidate, measures: Measures) -> bool:
        """Whether the plan has the stages and replicas that its schedule and ZeRO need."""
        return self.model.suits(found, measures) and (
            measures.zero == "none" or any(_replicas(stage) > 1 for stage in found.stages))

    def _without(self, taken: Candidate, allowed: Allowed, more: Sequence[Candidate]) -> Iterator[str]:
        for name, label in LABELS.items():
            least = allowed.without(name)
            if getattr(taken.measures, name) == getattr(least, name) or getattr(allowed, name) != AUTO:
                continue
            others = self.model.settled([*more, *self.played(least)])
            fast = min((one.latency_s for one in others if one.fits), default=None)
            if fast is not None:
                yield f"without {label}: {seconds_text(fast)} ({fast / taken.latency_s:.2f} times)"
            else:
                yield f"without {label}: {memory_text(self._lacking(least, others))} too large"

    def _lacking(self, allowed: Allowed, others: Sequence[Candidate]) -> float:
        """Bytes by which the smallest plan is too large for its fullest device."""
        usable = [device.usable_bytes for device in self.model.whole.devices]
        lacking = [max(peak - room for peak, room in zip(one.peak_memory_bytes, usable)) for one in others if not one.why_not]
        lacking += [least - min(usable) for least in self._least_bytes(allowed).values()]
        return min(lacking, default=float("nan"))

    def _least_bytes(self, allowed: Allowed) -> Dict[Measures, float]:
        divisions = allowed.divisions() if self.model.bounds_hold else []
        return {measures: error.least_bytes for measures, error in self.errors.items()
                if error.least_bytes is not None and (measures.zero, measures.offload) in divisions
                and (allowed.recompute == AUTO or measures.recompute == allowed.recompute)}

    def _raise(self, allowed: Allowed, found: Sequence[Candidate]) -> None:
        refused = [one for _, one in self._played.values() if one.why_not]
        if not found and refused:  # without any measures: a micro-batch has too few examples for its replicas
            best(refused, self.cluster)
        if not found and not self.errors and allowed.schedule not in ("backward_first", AUTO):
            what = "several stages" + " on each device" * (schedule_of(allowed.schedule).folding is not None)
            raise InfeasibleError(f"the searches found no plan of {self.model.name!r} with {what}, as schedule "
                                  f"{allowed.schedule!r} needs; use another schedule or search, more layers, or fewer devices")
        if allowed.zero not in ("none", AUTO) and not any(one for one in found if not one.why_not):
            raise PlanError(
                f"zero is {allowed.zero!r}, which divides over replicas, but no plan of {self.model.name!r} on "
                f"{self.cluster.name!r} has any; use zero 'none', or more devices")
        least = self._least_bytes(allowed)
        played = min((max(one.peak_memory_bytes) for one in found if not one.why_not), default=NEVER_S)
        if least and min(least.values()) < played:
            raise self.errors[min(least, key=lambda measures: least[measures])]
        if self.errors and not found:
            raise next(iter(self.errors.values()))
        best(found, self.cluster)


def _limit_s(found: Sequence[Candidate], search: str, measures: Measures) -> float:
    """The time above which one more plan of a search is neither taken nor reported.  A plan that divides or offloads more than
    one that fits is of interest only if it is faster."""
    fastest_s = min((one.latency_s for one in found if one.fits), default=NEVER_S)
    if (measures.zero, measures.offload) != ("none", "none"):
        return fastest_s
    own_s = min((one.latency_s for one in found if one.fits and one.search == search), default=NEVER_S)
    return max(own_s, fastest_s * NEAR)


def _of(found: Candidate) -> Tuple[Any, ...]:
    """What makes a plan, whichever search found it.  Candidates are kept, and so are their profiles and plans."""
    return found.stages, found.micro_batches, found.model_replicas, id(found.profile), id(found.plan)


def _distinct(found: Sequence[Candidate]) -> List[Candidate]:
    """Each plan once, as the first search found it."""
    return list({(_of(one), one.why_not): one for one in reversed(found)}.values())[::-1]


def _replicas(stage: Stage) -> int:
    return len(stage.devices) if stage.strategy == "split" else len(stage.all_devices)
