"""A snapshot's files.

::

    PATH/fit-0/step-000000040-1f/       of the script's first call of fit, after its step 40 (loop-0, session-0: see runs)
        part-0.index, part-0.data-...   tensors of process 0, as TensorFlow writes those of checkpoints
        part-0.json                     which these are, and checksums of the files
        part-1...
        manifest.json                   state of the run, and checksums of part-*.json: written last, by process 0

A snapshot without a manifest, or of which any file is missing or differs from its checksum, does not count; the one before does.
The number behind the step differs in each run, so that a run never finds its own files half written by the run before.  Where
processes have directories of their own (see neighbours), each of these may have only some of the files.
"""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import itertools
import json
import os
import re
import shutil
import time
import zlib
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

from whale_tf._tf_compat import tf
from whale_tf.documents import Record, field, plain, read
from whale_tf.errors import ScatteredError, SnapshotError

FORMAT = "whale_tf snapshot 1"
MANIFEST = "manifest.json"
FINISHED = "finished"  # file of a training run that does not train again
REACHED = "reached"  # file with the last step that was made, and the starts so far, whether a snapshot has them or not
STATE = "state/"  # names of arrays that belong to the run's state
PAUSE_S = .05
CLAIM_S = 5.0  # until the process that has claimed a directory has said which it is
SECTION_BYTES = 1 << 22  # of a file that is sent: larger ones come in sections, PATH@0, PATH@1 ...
Read = Callable[[], np.ndarray]
_FOLDER = re.compile(r"^step-(\d+)-([0-9a-f]+)$")


@dataclass(frozen=True)
class File(Record):
    """Size and checksum (CRC-32) of a file."""

    bytes: int
    crc32: int


@dataclass(frozen=True)
class Piece(Record):
    """A tensor of a part: a variable or a piece of it, or an array of the run's state.

    Attributes:
        tensor: its name in the file.
        variable: key of the variable.
        name: the variable's name.
        shape: of the whole variable.
        start: index of the piece's first element in each dimension.
        is_whole: the piece is the whole variable.
    """

    tensor: str
    variable: str
    name: str
    shape: Tuple[int, ...]
    start: Tuple[int, ...]
    is_whole: bool


@dataclass(frozen=True)
class Part(Record):
    """What one process has written."""

    pieces: Tuple[Piece, ...]
    files: Dict[str, File]


@dataclass(frozen=True)
class Manifest(Record):
    """Attributes:
    step: steps since the beginning of the training run.
    parts: the files ``part-*.json``.
    state: of the run, as JSON text.
    kept: which processes keep each part, if they have directories of their own.
    crc32: of the other fields' JSON text.
    """

    format: str
    step: int
    parts: Dict[str, File]
    state: str
    crc32: int = 0
    kept: Dict[str, Tuple[str, ...]] = field(factory=dict)

    def checksum(self) -> int:
        fields = {name: value for name, value in plain(self).items() if name != "crc32" and (value or name != "kept")}
        return zlib.crc32(json.dumps(fields, sort_keys=True).encode())

    def keepers(self, name: str) -> str:
        """Which processes kept a part, as the end of a message; empty: all had one directory."""
        return f"; it was kept by {' and by '.join(self.kept[name])}" if self.kept.get(name) else ""


class SnapshotValue(NamedTuple):
    """A variable of a snapshot: its key, its name, its whole value."""

    key: str
    name: str
    value: np.ndarray


class Snapshot:
    """A snapshot that has been found to be whole.

    Attributes:
        step: steps since the beginning of the training run.
    """

    def __init__(self, folder: str, manifest: Manifest, parts: Dict[str, Part]) -> None:
        self.folder, self.step = folder, manifest.step
        self._manifest, self._parts = manifest, parts

    def state(self) -> Tuple[Any, Dict[str, np.ndarray]]:
        """The run's state as JSON, and its arrays."""
        arrays = {piece.tensor[len(STATE):]: reader.get_tensor(piece.tensor)
                  for reader, pieces in self._readers() for piece in pieces if piece.tensor.startswith(STATE)}
        return json.loads(self._manifest.state), arrays

    def variables(self) -> Iterator[SnapshotValue]:
        """All variables, one after the other.

        Raises:
            SnapshotError: a piece of one is missing.
        """
        found: Dict[str, List[Tuple[Piece, Read]]] = {}
        for piece, read_it in self.pieces():
            found.setdefault(piece.variable, []).append((piece, read_it))
        for key, held in found.items():
            yield SnapshotValue(key, held[0][0].name, self._joined(held))

    def pieces(self) -> Iterator[Tuple[Piece, Read]]:
        """The pieces of all variables, and what reads the value of each.  Processes that run replicas of a model hold the same
        pieces, of which this is the first."""
        seen: Set[Tuple[str, Tuple[int, ...], Tuple[int, ...]]] = set()
        for reader, pieces in self._readers():
            sizes = reader.get_variable_to_shape_map()
            for piece in pieces:
                place = piece.variable, tuple(piece.start), tuple(sizes[piece.tensor])
                if not piece.tensor.startswith(STATE) and place not in seen:
                    seen.add(place)
                    yield piece, functools.partial(reader.get_tensor, piece.tensor)

    def _joined(self, held: Sequence[Tuple[Piece, Read]]) -> np.ndarray:
        for piece, read_it in held:
            if piece.is_whole:
                return read_it()
        values = [read_it() for _, read_it in held]
        first = held[0][0]
        whole, missing = np.empty(first.shape, values[0].dtype), int(np.prod(first.shape, dtype=np.int64))
        for value, (piece, _) in zip(values, held):
            place = tuple(slice(start, start + size) for start, size in zip(piece.start, value.shape))
            whole[place] = value
            missing -= value.size
        if missing:
            raise SnapshotError(f"snapshot {self.folder!r} lacks pieces of variable {first.name!r}; delete the snapshot, so that "
                                "the one before is used")
        return whole

    def _readers(self) -> Iterator[Tuple[Any, Sequence[Piece]]]:
        for name, part in sorted(self._parts.items()):
            if part.pieces:
                yield tf.train.load_checkpoint(os.path.join(self.folder, name[:-len(".json")])), part.pieces


class Store:
    """The snapshots of one training run.

    Args:
        keep: how many to keep.
        say: takes a message to the user.

    Attributes:
        path: the folder that has them.
    """

    def __init__(self, path: str, keep: int, say: Callable[[str], None]) -> None:
        self.path, self._keep, self._say = path, keep, say
        self._damaged: Set[str] = set()  # folders of snapshots that do not count
        self._scattered = ""  # the newest of those that may be whole elsewhere, and what it lacks

    def newest(self) -> Iterator[Snapshot]:
        """Snapshots that are whole, newest first.  What is wrong with others is said."""
        for _, _, folder in reversed(self._folders()):
            if not os.path.exists(os.path.join(folder, MANIFEST)):
                continue  # its run has ended while it was written
            try:
                yield opened(folder)
            except (OSError, ValueError) as error:
                self.leave_out(os.path.basename(folder), str(error), isinstance(error, ScatteredError))

    def leave_out(self, name: str, why: str, is_scattered: bool) -> None:
        """A snapshot does not count, which is said.

        Args:
            is_scattered: another host may have what it lacks.
        """
        folder = os.path.join(self.path, name)
        self._damaged.add(folder)
        what = f"snapshot {folder} (step {order(name)[0]}) does not count: {why}"
        self._scattered = self._scattered or (what if is_scattered else "")
        self._say(f"{what}; looking for the one before")

    def begin_anew(self) -> None:
        """Call if no snapshot counts.

        Raises:
            ScatteredError: hosts that are not here may have what one lacks, so that its training would be lost in silence.
        """
        if self._scattered:
            raise ScatteredError(f"{self._scattered}; nor does one before; start again with a host that has what is missing, or "
                                f"delete {self.path!r} on each host to train from the start")

    def names(self) -> List[str]:
        """The names of the snapshots' folders, whether these are whole or not."""
        return [os.path.basename(folder) for _, _, folder in self._folders()]

    def finish(self) -> None:
        """Notes that the training run has finished.

        Raises:
            OSError: it cannot be written.
        """
        os.makedirs(self.path, exist_ok=True)
        _write(os.path.join(self.path, FINISHED), "")

    @property
    def is_finished(self) -> bool:
        return os.path.exists(os.path.join(self.path, FINISHED))

    def folder(self, step: int, run: int) -> str:
        """Makes the folder of a snapshot."""
        path = os.path.join(self.path, f"step-{step:09d}-{run:x}")
        os.makedirs(path, exist_ok=True)
        return path

    def write_part(self, folder: str, rank: int, pieces: Sequence[Piece], tensors: Sequence[Any]) -> None:
        """Writes what this process has.

        Raises:
            OSError, tf.errors.OpError: it cannot be written; the disk is full.
        """
        prefix, files = os.path.join(folder, f"part-{rank}"), {}
        if pieces:
            tf.raw_ops.SaveV2(prefix=prefix, tensor_names=[piece.tensor for piece in pieces],
                              shape_and_slices=[""] * len(pieces), tensors=list(tensors))
        for name in os.listdir(folder):
            if name.startswith(f"part-{rank}.") and not name.endswith(".json"):
                files[name] = _synced(os.path.join(folder, name))
        _write(f"{prefix}.json", _text(Part(tuple(pieces), files)))

    def complete(self, folder: str, step: int, count: int, state: str, goes_on: Callable[[], bool],
                 kept: Optional[Dict[str, Tuple[str, ...]]] = None, share: Callable[[], None] = lambda: None) -> None:
        """Writes the manifest when the parts of all processes are there, and deletes old snapshots.

        Args:
            kept: see :class:`Manifest`.
            share: is called in between.

        Raises:
            OSError: it cannot be written.
            SnapshotError: a part has not come as long as ``goes_on``.
        """
        names, has_ended = [f"part-{rank}.json" for rank in range(count)], False
        while True:
            missing = [name for name in names if not _is_json(os.path.join(folder, name))]  # one that is sent grows
            if not missing:
                break
            if has_ended:
                raise SnapshotError(f"{', '.join(missing)} did not come to {folder!r}")
            has_ended = not goes_on()  # and then looks once more
            time.sleep(PAUSE_S)
        parts = {name: _described(os.path.join(folder, name)) for name in names}
        manifest = Manifest(FORMAT, step, parts, state, kept=kept or {})
        text = json.dumps(plain(dataclasses.replace(manifest, crc32=manifest.checksum()), defaults=False))
        write_manifest(folder, text)
        share()
        self.prune()

    def is_complete(self, folder: str) -> bool:
        return manifest_text(folder) is not None

    def delete(self, folder: str) -> None:
        """Deletes a snapshot: the manifest first, so that it never looks whole when it is not."""
        with contextlib.suppress(OSError):
            os.remove(os.path.join(folder, MANIFEST))
        shutil.rmtree(folder, ignore_errors=True)

    def delete_before(self, run: int) -> None:
        """Deletes the snapshots of runs before this one."""
        for _, number, folder in self._folders():
            if number < run:
                self.delete(folder)

    def prune(self) -> None:
        """Keeps the last few that have a manifest and count, and what is newer than these."""
        kept = 0
        for _, _, folder in reversed(self._folders()):
            if kept >= self._keep:
                self.delete(folder)
            kept += self.is_complete(folder) and folder not in self._damaged

    def _folders(self) -> List[Tuple[int, int, str]]:
        """Step, number of the run, and path of each snapshot, oldest first."""
        if not os.path.isdir(self.path):
            return []
        return sorted((*order(name), os.path.join(self.path, name)) for name in os.listdir(self.path) if _FOLDER.match(name))


def order(name: str) -> Tuple[int, int]:
    """Step and number of the run of a snapshot, from its folder's name."""
    found = _FOLDER.match(name)
    assert found is not None
    return int(found.group(1)), int(found.group(2), 16)


def opened(folder: str) -> Snapshot:
    """A snapshot, once it has been found to be whole.

    Raises:
        OSError, ValueError: a file is missing, or is not as it was written; ScatteredError: another host may have it.
    """
    with open(os.path.join(folder, MANIFEST), encoding="utf8") as handle:
        manifest = read_manifest(handle.read())
    join_sections(folder)
    parts = {}
    for name in manifest.parts:
        try:
            parts[name] = _part(folder, name, manifest)
        except (OSError, ValueError) as error:
            raise (ScatteredError if manifest.kept else ValueError)(f"{error}{manifest.keepers(name)}") from None
    return Snapshot(folder, manifest, parts)


def read_manifest(text: str) -> Manifest:
    """Raises:
        ValueError: it is not as it was written.
    """
    manifest = read(Manifest, json.loads(text))
    if manifest.format != FORMAT:
        raise ValueError(f"its format is {manifest.format!r}, expected {FORMAT!r}")
    if manifest.checksum() != manifest.crc32:
        raise ValueError(f"{MANIFEST} differs from its checksum")
    return manifest


def manifest_text(folder: str) -> Optional[str]:
    """The manifest of a snapshot, if it is there as it was written."""
    try:
        with open(os.path.join(folder, MANIFEST), encoding="utf8") as handle:
            text = handle.read()
        read_manifest(text)
    except (OSError, ValueError):
        return None
    return text


def write_manifest(folder: str, text: str) -> None:
    """Raises:
        OSError: it cannot be written.
    """
    _write(os.path.join(folder, MANIFEST), text)


def whole_parts(folder: str, manifest: Manifest) -> List[str]:
    """The parts of a snapshot that are whole in a folder."""
    found = []
    with contextlib.suppress(OSError):
        join_sections(folder)
    for name in manifest.parts:
        with contextlib.suppress(OSError, ValueError):
            _part(folder, name, manifest)
            found.append(name)
    return found


def sections(folder: str, name: str) -> Iterator[Tuple[str, bytes]]:
    """The files of a part, to be sent: names and contents of their sections; the part's own (``part-0.json``) at last, whole."""
    with open(os.path.join(folder, name), "rb") as handle:
        text = handle.read()
    for each in read(Part, json.loads(text.decode())).files:
        path = os.path.join(folder, each)
        count = -(-os.path.getsize(path) // SECTION_BYTES)
        with open(path, "rb") as handle:
            for number in range(max(1, count)):
                yield f"{each}@{number}" if count > 1 else each, handle.read(SECTION_BYTES)
    yield name, text


def join_sections(folder: str) -> None:
    """Makes files of the sections that were sent of them.

    Raises:
        OSError: one cannot be written.
    """
    for first in [name for name in os.listdir(folder) if name.endswith("@0")]:
        path = os.path.join(folder, first[:-len("@0")])
        count = next(number for number in itertools.count() if not os.path.exists(f"{path}@{number}"))
        with open(f"{path}.new", "wb") as out:
            for number in range(count):
                with open(f"{path}@{number}", "rb") as handle:
                    shutil.copyfileobj(handle, out)
        os.replace(f"{path}.new", path)
        for number in range(count):  # the first one first: without it the others are nothing
            os.remove(f"{path}@{number}")


def claim(folder: str, run: int, rank: int) -> int:
    """The first of the processes that reach a directory in this run: of those that call this, whichever was there first.

    Raises:
        OSError: nothing can be written there.
    """
    os.makedirs(folder, exist_ok=True)
    path = _claim(folder, f"{run:x}")
    try:
        own = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        pass
    else:
        os.write(own, b"%d\n" % rank)
        os.close(own)
        return rank
    limit = time.monotonic() + CLAIM_S
    while True:
        with open(path, encoding="utf8") as handle:
            text = handle.read()
        if text.endswith("\n"):
            return int(text)
        if time.monotonic() > limit:
            raise OSError(f"{path!r} is empty")
        time.sleep(PAUSE_S)


def end_claims(folder: str) -> None:
    """Call when all processes have made their claims."""
    for path in glob.glob(_claim(glob.escape(folder), "*")):
        with contextlib.suppress(OSError):
            os.remove(path)


def _claim(folder: str, run: str) -> str:
    return os.path.join(folder, f"claim-{run}")


def _part(folder: str, name: str, manifest: Manifest) -> Part:
    """Raises:
        OSError, ValueError: a file of this part is missing, or is not as it was written.
    """
    if manifest.parts[name] == _NOTHING:  # so that it needs not be there: its host may be lost
        return Part((), {})
    _check(folder, name, manifest.parts[name])
    with open(os.path.join(folder, name), encoding="utf8") as handle:
        part = read(Part, json.load(handle))
    for other, expected in part.files.items():
        _check(folder, other, expected)
    return part


def _text(part: Part) -> str:
    return json.dumps(plain(part))


_EMPTY = _text(Part((), {})).encode()
_NOTHING = File(len(_EMPTY), zlib.crc32(_EMPTY))  # the part of a process that alone held nothing


def _is_json(path: str) -> bool:
    """Whether a file is there, and whole."""
    try:
        with open(path, encoding="utf8") as handle:
            json.load(handle)
    except (OSError, ValueError):
        return False
    return True


def _check(folder: str, name: str, expected: File) -> None:
    found = _described(os.path.join(folder, name))
    if found != expected:
        what = f"has {found.bytes} bytes of {expected.bytes}" if found.bytes != expected.bytes else "differs from its checksum"
        raise ValueError(f"{name} {what}")


def _described(path: str) -> File:
    size = crc = 0
    with open(path, "rb") as handle:
        for block in iter(lambda: handle.read(1 << 20), b""):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return File(size, crc)


def _synced(path: str) -> File:
    """Size and checksum of a file, which is on the disk then."""
    with open(path, "rb") as handle:
        os.fsync(handle.fileno())
    return _described(path)


def _write(path: str, text: str) -> None:
    """Writes a file as a whole or not at all."""
    with open(f"{path}.new", "w", encoding="utf8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(f"{path}.new", path)
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
