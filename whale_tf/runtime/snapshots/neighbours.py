"""Processes that have directories of their own: each part of a snapshot is also kept by a neighbour, and comes back from there.

::

    host a: step-8-1f/                          host b: step-8-1f/
        part-0.data, .index, .json  ── copy ──>     part-0.data, .index, .json
        part-1.data, .index, .json  <── copy ──     part-1.data, .index, .json
        manifest.json  ───────── at last ─────>     manifest.json

A place is a directory, and the processes that reach it; the first of them leads.  A copy has the name and the checksums of what
it is a copy of, so that any place may have any part.  What a process has written is sent by the thread that has written it; the
TensorFlow server of the receiver writes it there, without Python.

When a run goes on, the processes tell each other which parts they have, and each place gets those that it lacks; from then on
its directory is like one that all reach.  Numbers of processes mean nothing there: hosts may be lost, added, or numbered anew.
"""
from __future__ import annotations

import contextlib
import json
import os
from typing import Any, Callable, ContextManager, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

from whale_tf._tf_compat import tf
from whale_tf.errors import SnapshotError
from whale_tf.runtime.snapshots import files
from whale_tf.runtime.snapshots.files import MANIFEST, REACHED, Snapshot, Store

Write = Callable[[str, bytes], None]  # path, contents


class Delivery(NamedTuple):
    """A part that one process gives another one."""

    sender: int
    receiver: int
    part: str


def neighbour_of(rank: int, leads: Sequence[int], hosts: Sequence[str]) -> int:
    """The process that keeps the part of another one: the next one at another place, on another host if there is one.

    Args:
        leads: the process that leads each one's place; there are several places.
        hosts: of the processes.
    """
    others = [other % len(leads) for other in range(rank + 1, rank + len(leads)) if leads[other % len(leads)] != leads[rank]]
    return next((other for other in others if hosts[other] != hosts[rank]), others[0])


def deliveries(held: Dict[int, Set[str]], parts: Sequence[str]) -> Tuple[List[Delivery], List[str]]:
    """Which process gives which parts to which others, so that all have all of them; and the parts that none has.  Those that
    have a part give it in turns.

    Args:
        held: parts that are whole at each place, by the process that leads it.
    """
    found, missing = [], []
    for part in parts:
        having = sorted(lead for lead, own in held.items() if part in own)
        if not having:
            missing.append(part)
            continue
        for number, lead in enumerate(sorted(set(held) - set(having))):
            found.append(Delivery(having[number % len(having)], lead, part))
    return found, missing


class Neighbours:
    """See the module's docstring; of one training run, in one of its processes.

    Args:
        leads: the process that leads the place of each one.
        addresses: of the processes.
        keeps: whether parts are also kept by neighbours.
        exchange: the texts of all processes, once all have come here.
        writing_at: see :meth:`whale_tf.processes.runtime.Runtime.writing_at`.
        has_lost: whether another process has ended.
        says: takes a message to the user.

    Attributes:
        sent: bytes that the neighbour got of the last snapshot.
    """

    def __init__(self, store: Store, rank: int, leads: Sequence[int], addresses: Sequence[str], keeps: bool,
                 exchange: Callable[[bytes], List[bytes]], writing_at: Callable[[int], ContextManager[Write]],
                 has_lost: Callable[[], bool], says: Callable[[str], None]) -> None:
        self._store, self._rank, self._leads, self._addresses = store, rank, leads, addresses
        self._exchange, self._writing_at, self._has_lost, self._says = exchange, writing_at, has_lost, says
        hosts = [address.rpartition(":")[0] for address in addresses]
        self._keepers = [neighbour_of(each, leads, hosts) if keeps else None for each in range(len(leads))]
        self._paths: List[str] = []  # the store's path, by process
        self.sent = 0

    @property
    def leads(self) -> bool:
        """Whether this process leads its place."""
        return self._leads[self._rank] == self._rank

    def line(self) -> str:
        """Where parts are kept, for the user."""
        keeper = self._keepers[self._rank]
        return f"the processes have {len(set(self._leads))} directories, " + (
            "and parts are not kept by neighbours (snapshot.neighbour)" if keeper is None else
            f"so {self._name(keeper)} has a copy of what this one writes, {self.sent / 2**20:.1f} MiB in the last snapshot")

    # ------------------------------------------------------------------------------------------------- while training
    def kept(self) -> Dict[str, Tuple[str, ...]]:
        """Which processes keep each part, for the manifest."""
        return {f"part-{rank}.json": tuple(self._name(each) for each in (rank, keeper) if each is not None)
                for rank, keeper in enumerate(self._keepers)}

    def send_part(self, folder: str) -> None:
        """Gives the neighbour a copy of what this process has written, and lets process 0 know of it.

        Raises:
            SnapshotError: it cannot be sent.
            OSError: it cannot be read.
        """
        name, keeper = f"part-{self._rank}.json", self._keepers[self._rank]
        if keeper is not None:
            self.sent = self._send(keeper, folder, files.sections(folder, name))
        knows = {self._leads[each] for each in (self._rank, keeper) if each is not None}
        if self._leads[0] not in knows:
            with open(os.path.join(folder, name), "rb") as handle:
                self._send(0, folder, [(name, handle.read())])

    def send_manifest(self, folder: str) -> None:
        """Completes a snapshot at the other places, in process 0.  It counts as soon as one has its manifest."""
        text = files.manifest_text(folder)
        assert text is not None
        for lead in sorted(set(self._leads) - {self._leads[self._rank]}):
            try:
                self._send(lead, folder, [(MANIFEST, text.encode())])
            except SnapshotError as error:
                if not self._has_lost():
                    self._says(str(error))

    def _send(self, to: int, folder: str, contents: Iterable[Tuple[str, bytes]]) -> int:
        """Writes files at another process; returns their bytes."""
        place, size = os.path.join(self._paths[to], os.path.basename(folder)), 0
        try:
            with self._writing_at(to) as write:
                for name, content in contents:
                    if self._has_lost():
                        raise SnapshotError(f"another process has ended before {self._name(to)} had all of {place!r}")
                    write(os.path.join(place, name), content)
                    size += len(content)
        except tf.errors.OpError as error:
            raise SnapshotError(f"{self._name(to)} cannot write {place!r} for process {self._rank}: {error.message}") from None
        return size

    def _name(self, rank: int) -> str:
        return f"process {rank} ({self._addresses[rank]})"

    # ------------------------------------------------------------------------------------------------- when a run goes on
    def newest(self) -> Optional[Snapshot]:
        """The newest snapshot that all places together have as a whole; from now on each of them has.

        Raises:
            SnapshotError: one place cannot give another one what that lacks.
        """
        names = self._store.names() if self.leads else []
        own = {name: files.manifest_text(os.path.join(self._store.path, name)) for name in names}
        told = self._tell([self._store.path, own, self._reached()])
        self._paths = [path for path, _, _ in told]
        manifests = {name: text for _, one, _ in told for name, text in one.items() if text is not None}
        self._reach(max((reached for _, _, reached in told), key=lambda one: int(one.get("step", -1))))
        for name in sorted(manifests, key=files.order, reverse=True):
            folder, manifest = os.path.join(self._store.path, name), files.read_manifest(manifests[name])
            rows = self._tell(files.whole_parts(folder, manifest) if self.leads else [])
            held = {lead: set(rows[lead]) for lead in set(self._leads)}
            gifts, missing = deliveries(held, list(manifest.parts))
            if not missing:
                self._deliver(folder, gifts, manifests[name])
                return files.opened(folder)
            self._store.leave_out(name, "; ".join(
                f"no process has all of {part[:-len('.json')]}{manifest.keepers(part)}" for part in missing), bool(manifest.kept))
        return None

    def _reached(self) -> Dict[str, Any]:
        """What this place knows of the last step that was made."""
        with contextlib.suppress(OSError, ValueError), open(os.path.join(self._store.path, REACHED), encoding="utf8") as handle:
            return dict(json.load(handle))
        return {}

    def _reach(self, last: Dict[str, Any]) -> None:
        """The place of process 0, which tells what was lost, may be new."""
        if self.leads and last != self._reached():
            with contextlib.suppress(OSError), open(os.path.join(self._store.path, REACHED), "w", encoding="utf8") as out:
                json.dump(last, out)

    def _deliver(self, folder: str, gifts: Sequence[Delivery], manifest: str) -> None:
        """Makes a snapshot whole at all places."""
        for sender, receiver in sorted({gift[:2] for gift in gifts}):
            parts = ", ".join(gift.part[:-len(".json")] for gift in gifts if gift[:2] == (sender, receiver))
            self._says(f"{self._name(receiver)} gets {parts} of snapshot {folder} from {self._name(sender)}")
        self._do(lambda: [self._send(gift.receiver, folder, files.sections(folder, gift.part))
                          for gift in gifts if gift.sender == self._rank])
        self._do(lambda: self._complete(folder, manifest) if self.leads else None)

    def _complete(self, folder: str, manifest: str) -> None:
        if files.manifest_text(folder) is None:
            os.makedirs(folder, exist_ok=True)
            files.write_manifest(folder, manifest)
        files.opened(folder)  # joins sections before others read them

    def _do(self, what: Callable[[], Any]) -> None:
        """Each process does its share.

        Raises:
            SnapshotError: one of them, which is known to all, cannot.
        """
        wrong = ""
        try:
            what()
        except (SnapshotError, OSError, ValueError) as error:
            wrong = f"{self._name(self._rank)}: {error}"
        found = [each for each in self._tell(wrong) if each]
        if found:
            raise SnapshotError(f"the snapshot to go on with cannot be brought to all processes ({'; '.join(found)}); see that "
                                "they can write there, and start again")

    def _tell(self, what: Any) -> List[Any]:
        """What all processes tell, by rank."""
        return [json.loads(text) for text in self._exchange(json.dumps(what).encode())]
