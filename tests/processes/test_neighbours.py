"""Snapshots of processes that have directories of their own: after any losses, all go on with the newest that is still whole."""
from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import threading
from contextlib import nullcontext
from typing import Any, Callable, Iterator, List, NamedTuple, Optional, Sequence, Set

import pytest

from whale_tf.errors import SnapshotError
from whale_tf.runtime.snapshots import files, writing
from whale_tf.runtime.snapshots.files import File, Store
from whale_tf.runtime.snapshots.neighbours import Neighbours, Write, deliveries, neighbour_of
from whale_tf.runtime.snapshots.writing import Job, Writer

KEEP = 2


@pytest.fixture(autouse=True)
def without_tensorflow(monkeypatch: Any) -> None:
    monkeypatch.setattr(Store, "write_part", lambda store, folder, rank, pieces, tensors: write(store, folder, rank))
    monkeypatch.setattr(writing, "OTHERS_S", 10)


class Processes(NamedTuple):
    """Processes of a job, in threads.

    Attributes:
        paths: the directory of each process.
        told: what was said.
    """

    paths: Sequence[str]
    hosts: Sequence[str]
    told: List[str]

    def run(self, what: Callable[[Neighbours, Store, int], Any], keeps: bool = True, run: int = 1) -> List[Any]:
        """What each process returns, or the error that it raises."""
        count, results = len(self.paths), [None] * len(self.paths)  # type: int, List[Any]
        barrier, texts = threading.Barrier(count, timeout=20), [b""] * count

        def process(rank: int) -> None:
            def exchange(text: bytes) -> List[bytes]:
                texts[rank] = text
                barrier.wait()
                found = list(texts)
                barrier.wait()
                return found

            @contextlib.contextmanager
            def writing_at(to: int) -> Iterator[Write]:
                def write(path: str, contents: bytes) -> None:
                    assert path.startswith(self.paths[to] + "/")
                    os.makedirs(os.path.dirname(path), exist_ok=True)
                    with open(path, "wb") as handle:
                        handle.write(contents)
                yield write

            try:
                lead = files.claim(self.paths[rank], run, rank)
                leads = [int(text) for text in exchange(b"%d" % lead)]
                if lead == rank:
                    files.end_claims(self.paths[rank])
                exchange(b"")
                assert len({self.paths[one] for one in set(leads)}) == len(set(self.paths)) == len(set(leads))
                store = Store(self.paths[rank], KEEP, self.told.append)
                addresses = [f"{host}:{number}" for number, host in enumerate(self.hosts)]
                results[rank] = what(Neighbours(store, rank, leads, addresses, keeps, exchange, writing_at, lambda: False,
                                                self.told.append), store, rank)
            except BaseException as error:  # whatever it is, the caller looks at it
                results[rank] = error
                if not isinstance(error, SnapshotError):  # which all raise
                    barrier.abort()

        threads = [threading.Thread(target=process, args=(rank,)) for rank in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def write(store: Store, folder: str, rank: int) -> None:
    """As ``Store.write_part``, without TensorFlow: contents tell whose they are."""
    name = f"part-{rank}.data"
    with open(os.path.join(folder, name), "wb") as handle:
        handle.write(b"%s of %d\n" % (os.path.basename(folder).encode(), rank) * 3)
    with open(os.path.join(folder, f"part-{rank}.json"), "w", encoding="utf8") as out:
        json.dump({"pieces": [], "files": {name: files.plain(files._described(os.path.join(folder, name)))}}, out)


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(8, 60))])
def test_newest_that_is_left(tmp_path: Any, monkeypatch: Any, seed: int) -> None:
    """Processes of any hosts and directories take snapshots; directories are lost and files damaged; and other processes, with
    new directories among theirs, go on with what is left."""
    rng, told = random.Random(seed), []  # type: random.Random, List[str]
    monkeypatch.setattr(files, "SECTION_BYTES", rng.choice([1, 20, 1000]))
    count, keeps = rng.randint(2, 5), rng.random() < .8
    places = [str(tmp_path / f"place-{number}") for number in range(rng.randint(2, count))]
    paths = [*places, *rng.choices(places, k=count - len(places))]
    hosts = [rng.choice("ab") if rng.random() < .2 else path for path in paths]
    job, steps = Processes(paths, hosts, told), list(range(1, rng.randint(2, 5)))

    def take(neighbours: Neighbours, store: Store, rank: int) -> int:
        assert neighbours.newest() is None
        writer = Writer(count, rank, "/device:CPU:0", lambda: False, neighbours)
        for step in steps:
            written = Job(store, store.folder(step, 1), step, json.dumps(step), [], [])
            writer.start(written)
            assert writer.wait_for_manifest(written), told
        with open(os.path.join(store.path, files.REACHED), "w", encoding="utf8") as out:
            json.dump({"step": steps[-1] + 1}, out)
        return neighbours.sent

    sent = job.run(take, keeps)
    assert not told and all(isinstance(one, int) and bool(one) == keeps for one in sent), (sent, told)
    lost = rng.sample(places, rng.randint(0, 2))
    for place in lost:
        shutil.rmtree(place)
    for _ in range(rng.randint(0, 3)):
        names = sorted(os.path.join(folder, name) for place in places for folder, _, found in os.walk(place) for name in found
                       if name != files.REACHED)
        if names:
            damage(rng, rng.choice(names))
    expected = [step for step in steps if is_left(places, step, count)]
    new = [*places, str(tmp_path / "new"), str(tmp_path / "newer")]
    again = rng.sample(new, rng.randint(2, len(new))) + rng.choices(new, k=rng.randint(0, 1))
    reachable = [step for step in expected if is_left(again, step, count)]

    was_reached = any(os.path.exists(os.path.join(place, files.REACHED)) for place in again)

    def go_on(neighbours: Neighbours, store: Store, rank: int) -> int:
        found = neighbours.newest()
        assert neighbours._reached() == ({"step": steps[-1] + 1} if was_reached else {})
        if found is None:
            return 0
        text = json.dumps(sorted(os.listdir(found.folder)))
        assert found.state()[0] == found.step and len(set(neighbours._tell(text))) == 1, text
        assert files.opened(found.folder).step == found.step == next(store.newest()).step
        return found.step

    results = Processes(again, again, told).run(go_on, keeps, run=2)
    assert results == [max(reachable, default=0)] * len(again), (results, reachable, told)
    if len(lost) == 1 and keeps and not told:
        assert max(expected) == max(steps)


def damage(rng: random.Random, path: str) -> None:
    """Not all at once: a file is torn, changed or deleted."""
    with open(path, "rb") as handle:
        contents = bytearray(handle.read())
    how = rng.choice(["torn", "changed", "deleted"])
    if how == "deleted" or not contents:
        os.remove(path)
        return
    if how == "torn":
        del contents[rng.randrange(len(contents)):]
    else:
        contents[rng.randrange(len(contents))] ^= 1 << rng.randrange(8)
    with open(path, "wb") as out:
        out.write(contents)


def is_left(places: Sequence[str], step: int, count: int) -> bool:
    """Whether all that belongs to a snapshot is somewhere as it was written."""
    folders = [os.path.join(place, f"step-{step:09d}-1") for place in places]
    text = next((found for found in map(files.manifest_text, folders) if found is not None), None)
    if text is None:
        return False
    manifest = files.read_manifest(text)
    assert len(manifest.parts) == count
    return all(any(holds(folder, rank, manifest.parts[f"part-{rank}.json"]) for folder in folders) for rank in range(count))


def holds(folder: str, rank: int, known: File) -> bool:
    name = os.path.basename(folder).encode()
    try:
        if files._described(os.path.join(folder, f"part-{rank}.json")) != known:
            return False
        path = os.path.join(folder, f"part-{rank}.data")
        contents = b"".join(open(one, "rb").read() for one in sections_of(path))
    except OSError:
        return False
    return contents == b"%s of %d\n" % (name, rank) * 3


def sections_of(path: str) -> List[str]:
    """A file, or the sections that were sent of it."""
    if not os.path.exists(f"{path}@0"):
        return [path]
    names = [f"{path}@{number}" for number in range(1000)]
    return names[:next(number for number, name in enumerate(names) if not os.path.exists(name))]


def taking(count: int, *steps: int) -> Callable[[Neighbours, Store, int], None]:
    """What each of so many processes does to take empty snapshots at steps."""
    def take(neighbours: Neighbours, store: Store, rank: int) -> None:
        neighbours.newest()
        writer = Writer(count, rank, "/device:CPU:0", lambda: False, neighbours)
        for step in steps:
            written = Job(store, store.folder(step, 1), step, "{}", [], [])
            writer.start(written)
            assert writer.wait_for_manifest(written)

    return take


def test_snapshot_without_its_neighbour(tmp_path: Any) -> None:
    """Which parts are missing, who had them, and which snapshot is used, is said."""
    told: List[str] = []
    paths = [str(tmp_path / name) for name in "abc"]

    assert Processes(paths, "abc", told).run(taking(3, 4, 8)) == [None] * 3 and not told
    for place in "bc":
        os.remove(tmp_path / place / "step-000000008-1" / "part-1.data")
    found = Processes(paths, "abc", told).run(lambda neighbours, store, rank: neighbours.newest(), run=2)
    assert [one.step for one in found] == [4] * 3
    assert f"snapshot {paths[0]}/step-000000008-1 (step 8) does not count: no process has all of part-1; it was kept by " \
        "process 1 (b:1) and by process 2 (c:2); looking for the one before" in told
    assert f"process 0 (a:0) gets part-1 of snapshot {paths[0]}/step-000000004-1 from process 1 (b:1)" in told
    with pytest.raises(ValueError, match=r"part-1.data.*; it was kept by process 1 \(b:1\) and by process 2 \(c:2\)"):
        files.opened(str(tmp_path / "b" / "step-000000008-1"))


@pytest.mark.parametrize("hosts, is_enough", [("ab", True), ("aabb", True), ("abc", False), ("abcd", False), ("abbc", False)])
def test_one_goes_on_alone(tmp_path: Any, hosts: str, is_enough: bool) -> None:
    """A process that is left has its own directory, which is enough where it has all parts; otherwise it does not begin anew.
    Once all have gone on, it is enough."""
    told: List[str] = []
    paths = [str(tmp_path / host) for host in hosts]

    def alone(path: str) -> Optional[int]:
        store = Store(path, KEEP, told.append)
        found = next(store.newest(), None)
        if found is None:
            store.begin_anew()
        return found and found.step

    assert Processes(paths, hosts, told).run(taking(len(hosts), 4, 8)) == [None] * len(hosts) and not told
    for path in paths:
        with nullcontext() if is_enough else pytest.raises(SnapshotError, match=(
                r"step-000000008-1 \(step 8\) does not count: .*part-\d.*; it was kept by process .* and by process .*; nor "
                r"does one before; start again with a host that has what is missing, or delete '.*' on each host to train from")):
            assert alone(path) == 8
    Processes(paths, hosts, told).run(lambda neighbours, store, rank: neighbours.newest(), run=2)
    assert [alone(path) for path in paths] == [8] * len(hosts)


def test_what_cannot_be_brought_is_said_to_all(tmp_path: Any) -> None:
    told: List[str] = []
    paths = [str(tmp_path / name) for name in "ab"]

    Processes(paths, "ab", told).run(taking(2, 4))
    shutil.rmtree(tmp_path / "a")
    os.makedirs(tmp_path / "a")
    (tmp_path / "a" / "step-000000004-1").write_text("in the way")
    found = Processes(paths, "ab", told).run(lambda neighbours, store, rank: neighbours.newest(), run=2)
    for error in found:
        assert isinstance(error, SnapshotError) and "cannot be brought to all processes (process 1 (b:1): " in str(error), found


def test_who_keeps_and_who_gives() -> None:
    for seed in range(200):
        check_who(random.Random(seed))


def check_who(rng: random.Random) -> None:
    count = rng.randint(2, 8)
    first = [rng.randrange(number + 1) for number in range(count)]
    leads = [one if first[one] == one else number for number, one in enumerate(first)]
    leads = [lead if leads[lead] == lead else number for number, lead in enumerate(leads)]
    if len(set(leads)) > 1:
        hosts = [rng.choice("abc") for _ in leads]
        for rank in range(count):
            keeper = neighbour_of(rank, leads, hosts)
            others = {other for other in range(count) if leads[other] != leads[rank]}
            away = {other for other in others if hosts[other] != hosts[rank]}
            assert keeper in (away or others)
    parts = [f"part-{number}.json" for number in range(rng.randint(1, 5))]
    held = {lead: {part for part in parts if rng.random() < .5} for lead in leads}
    gifts, missing = deliveries(held, parts)
    assert set(missing) == set(parts) - set().union(*held.values())
    after = {lead: set(own) for lead, own in held.items()}
    for sender, receiver, part in gifts:
        assert part in held[sender] and part not in after[receiver], "given once, by one who has it"
        after[receiver].add(part)
    wanted: Set[str] = set(parts) - set(missing)
    assert all(own == wanted for own in after.values())
