"""Real data which every installation has: Python's own source text, and scikit-learn's handwritten digits.

A function `<task>_examples(count, ..., seed)` returns all examples of a task as one NamedTuple of NumPy arrays whose
first dimension counts examples. `batches` and `dataset` turn any of them into an endless stream of mini-batches, in
NumPy and in `tf.data`. The same NamedTuple types hold placeholders and dataset elements, so feeding is

    for batch in data.batches(examples, 32):
        session.run(train_op, dict(zip(model.inputs, batch)))

The same seed gives the same numbers; text differs a little between Python versions, as their libraries do.
"""
from __future__ import annotations

import collections
import functools
import glob
import os
import re
from typing import Any, Iterator, List, NamedTuple, Optional, Sequence, Tuple, TypeVar

import numpy as np
import tensorflow.compat.v1 as tf

PAD, UNKNOWN, CLS, SEP, MASK = range(5)
SENTINELS = (5, 6, 7)  # stand for the removed spans of T5's pre-training
NUM_SPECIAL = 8
BYTE_VOCAB = NUM_SPECIAL + 256

DIGIT_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

Examples = TypeVar("Examples", bound=tuple)


class ImageBatch(NamedTuple):
    """Images `[B, h, w, C]` (or features `[B, D]`) with integer class labels `[B]`."""

    images: Any
    labels: Any


class LanguageModelBatch(NamedTuple):
    """Tokens int32 `[B, S]` and the tokens that follow them, labels int32 `[B, S]`."""

    tokens: Any
    labels: Any


class MaskedLmBatch(NamedTuple):
    """Masked language model with sentence pairs (Devlin et al. 2019, section 3.1 and appendix A.1).

    Attributes:
        tokens: int32 `[B, S]`, with masked positions replaced.
        segments: int32 `[B, S]`, 0 in the first sentence and 1 in the second.
        positions: int32 `[B, P]`, the masked positions in rising order; unused ones are 0.
        labels: int32 `[B, P]`, the original tokens there.
        weights: float `[B, P]`, 1 for used positions and 0 for unused ones.
        next_sentence: int32 `[B]`, 1 where the second sentence follows the first in the text.
    """

    tokens: Any
    segments: Any
    positions: Any
    labels: Any
    weights: Any
    next_sentence: Any


class Seq2SeqBatch(NamedTuple):
    """Source and target sequences.

    Attributes:
        source: int32 `[B, S]`, padded with PAD.
        source_mask: float `[B, S]`, 1 for tokens and 0 for padding.
        target: int32 `[B, T]`, what the decoder reads: CLS, then the target.
        labels: int32 `[B, T]`, the expected output: the target, then SEP.
        weights: float `[B, T]`, 1 for tokens of `labels` and 0 for padding.
    """

    source: Any
    source_mask: Any
    target: Any
    labels: Any
    weights: Any


class CaptionBatch(NamedTuple):
    """Images `[B, h, w, C]` with a text pair: the fields of `Seq2SeqBatch` follow the image."""

    images: Any
    source: Any
    source_mask: Any
    target: Any
    labels: Any
    weights: Any


class ClickBatch(NamedTuple):
    """Recommendation records: dense features `[B, D]`, categories int32 `[B, F]`, labels 0.0 or 1.0 `[B]`."""

    dense: Any
    categories: Any
    labels: Any


class SegmentationBatch(NamedTuple):
    """Images `[B, h, w, C]` with an integer class per pixel, labels `[B, h, w]`."""

    images: Any
    labels: Any


class GanBatch(NamedTuple):
    """Real images `[B, h, w, C]` and the generator's noise `[B, Z]`."""

    images: Any
    noise: Any


# -- streams of mini-batches -------------------------------------------------------------------------------------------


def batches(examples: Examples, batch_size: int, seed: int = 0, drop_remainder: bool = True) -> Iterator[Examples]:
    """Endless mini-batches, reshuffled in every epoch.

    Args:
        examples: NamedTuple of arrays of equal first dimension N.
        batch_size: B.
        seed: seed of the order.
        drop_remainder: whether to leave out the last, smaller mini-batch of an epoch.

    Yields:
        The same NamedTuple type with first dimension B.

    Raises:
        ValueError: B is larger than N, so that no full mini-batch exists.
    """
    total = len(examples[0])
    if batch_size > total:
        raise ValueError(f"batch_size is {batch_size}, but there are only {total} examples; make more examples or use a smaller "
                         "batch_size")
    rng = np.random.RandomState(seed)
    while True:
        order = rng.permutation(total)
        stop = total - total % batch_size if drop_remainder else total
        for start in range(0, stop, batch_size):
            rows = order[start:start + batch_size]
            yield type(examples)(*[field[rows] for field in examples])


def dataset(examples: Examples, batch_size: int, seed: Optional[int] = None,
            drop_remainder: bool = True) -> tf.data.Dataset:
    """The same as an endless `tf.data.Dataset` whose elements have the NamedTuple type of `examples`.

    Args:
        examples: NamedTuple of arrays of equal first dimension N.
        batch_size: B.
        seed: seed of the shuffling; None keeps the order of the examples.
        drop_remainder: whether to leave out the last, smaller mini-batch; the batch dimension is static only then.
    """
    stream = tf.data.Dataset.from_tensor_slices(examples)
    if seed is not None:
        stream = stream.shuffle(len(examples[0]), seed=seed)
    return stream.batch(batch_size, drop_remainder=drop_remainder).repeat()


# -- text --------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=None)
def corpus(max_bytes: int = 1 << 20) -> str:
    """Text of Python's licence and of its standard library's modules in alphabetical order, cut at `max_bytes`."""
    library = os.path.dirname(os.__file__)
    files = [os.path.join(library, "LICENSE.txt")] + sorted(glob.glob(os.path.join(library, "*.py")))
    parts: List[bytes] = []
    missing = max_bytes
    for path in files:
        if missing > 0 and os.path.isfile(path):
            with open(path, "rb") as stream:
                parts.append(stream.read(missing))
            missing -= len(parts[-1])
    return b"".join(parts).decode("utf-8", errors="ignore")


@functools.lru_cache(maxsize=None)
def corpus_ids(vocab: int = BYTE_VOCAB) -> np.ndarray:
    """The corpus as token ids int32 `[N]`: bytes if `vocab` is `BYTE_VOCAB`, else its most frequent words.

    Args:
        vocab: number of tokens V, the `NUM_SPECIAL` special ones included. Words beyond it become `UNKNOWN`.
    """
    if vocab == BYTE_VOCAB:
        return byte_ids(corpus())
    words = re.findall(r"\w+|[^\w\s]", corpus())
    counts = collections.Counter(words)
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[:vocab - NUM_SPECIAL]
    ids = {word: NUM_SPECIAL + i for i, word in enumerate(frequent)}
    return np.array([ids.get(word, UNKNOWN) for word in words], np.int32)


def byte_ids(text: str) -> np.ndarray:
    """UTF-8 bytes of `text` as token ids int32 `[N]`."""
    return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32) + NUM_SPECIAL


def language_model_examples(count: int, seq: int, vocab: int = BYTE_VOCAB, seed: int = 0) -> LanguageModelBatch:
    """`count` windows of `seq` consecutive tokens with the tokens that follow them."""
    windows = _windows(corpus_ids(vocab), count, seq + 1, np.random.RandomState(seed))
    return LanguageModelBatch(windows[:, :-1], windows[:, 1:])


def masked_lm_examples(count: int, seq: int, predictions: int, vocab: int = BYTE_VOCAB, seed: int = 0,
                       dtype: str = "float32") -> MaskedLmBatch:
    """`count` sentence pairs `[CLS] a [SEP] b [SEP]` with masked tokens.

    Each token is masked with probability 0.15 (at least one and at most `predictions` of a sequence); of the masked
    tokens 80% become MASK, 10% a random token, and 10% stay. In half of the pairs b follows a in the text.

    Args:
        count: number of examples.
        seq: sequence length S, at least `predictions` + 3.
        predictions: masked positions P.
        vocab: number of tokens.
        seed: seed of the sampling.
        dtype: type of the weights.

    Raises:
        ValueError: the sequence is too short for its masked positions.
    """
    if seq < predictions + 3:
        raise ValueError(f"seq is {seq}, but {predictions} masked positions need at least {predictions + 3} tokens "
                         f"([CLS], two [SEP]); use a longer "
                         "seq or fewer predictions")
    rng, ids = np.random.RandomState(seed), corpus_ids(vocab)
    first = (seq - 3) // 2
    pairs = _windows(ids, count, seq - 3, rng)
    follows = rng.randint(0, 2, count).astype(np.int32)
    others = _windows(ids, count, seq - 3, rng)
    second = np.where(follows[:, None] == 1, pairs, others)[:, first:]
    cls, sep = np.full([count, 1], CLS, np.int32), np.full([count, 1], SEP, np.int32)
    tokens = np.concatenate([cls, pairs[:, :first], sep, second, sep], axis=1)
    segments = np.tile((np.arange(seq) > first + 1).astype(np.int32), [count, 1])
    maskable = np.array([i for i in range(seq) if i not in (0, first + 1, seq - 1)])
    used = np.clip(rng.binomial(seq - 3, 0.15, count), 1, predictions)
    positions = np.zeros([count, predictions], np.int32)
    for row, number in enumerate(used):
        positions[row, :number] = np.sort(rng.choice(maskable, number, replace=False))
    weights = (np.arange(predictions) < used[:, None]).astype(dtype)
    rows = np.arange(count)[:, None]
    labels = tokens[rows, positions]
    tokens[rows, positions] = np.where(weights > 0, _disguise(labels, vocab, rng), labels)
    return MaskedLmBatch(tokens, segments, positions, labels, weights, follows)


def _disguise(labels: np.ndarray, vocab: int, rng: np.random.RandomState) -> np.ndarray:
    """Replace tokens `[N, P]`: 80% by MASK, 10% by random tokens, 10% by themselves."""
    fate, other = rng.rand(*labels.shape), rng.randint(NUM_SPECIAL, vocab, labels.shape)
    return np.where(fate < 0.8, MASK, np.where(fate < 0.9, other, labels)).astype(np.int32)


def _windows(ids: np.ndarray, count: int, length: int, rng: np.random.RandomState) -> np.ndarray:
    """`count` random windows `[count, length]` of `ids`."""
    starts = rng.randint(0, len(ids) - length, count)
    return ids[starts[:, None] + np.arange(length)]


def true_case_examples(count: int, source: int, target: int, seed: int = 0, dtype: str = "float32") -> Seq2SeqBatch:
    """Translation from case-folded lines of text to the lines as written, in bytes.

    Args:
        count: number of examples.
        source: source length S.
        target: target length T.
        seed: seed of the sampling.
        dtype: type of masks and weights.

    Raises:
        ValueError: no line of text is short enough.
    """
    longest = min(source, target) - 1
    lines = [line.strip() for line in corpus().splitlines()]
    lines = [line for line in lines if 4 <= len(line.encode("utf-8")) <= longest and line.lower() != line]
    if not lines:
        raise ValueError(f"no line of text has 4 to {longest} bytes; use a source and target length of at least 12")
    chosen = [lines[i] for i in np.random.RandomState(seed).randint(0, len(lines), count)]
    return seq2seq([byte_ids(line.lower()) for line in chosen], [byte_ids(line) for line in chosen], source, target,
                   dtype)


def span_corruption_examples(count: int, source: int, target: int, seed: int = 0,
                             dtype: str = "float32") -> Seq2SeqBatch:
    """T5's pre-training task on bytes (Raffel et al. 2020, figure 2): predict the spans that were removed.

    About 15% of a window of text is removed as one to three spans of three bytes, each replaced by its sentinel; the
    target is each sentinel followed by its span.

    Args:
        count: number of examples.
        source: source length S.
        target: target length T; at least 4 per span.
        seed: seed of the sampling.
        dtype: type of masks and weights.

    Raises:
        ValueError: the target is too short for the spans.
    """
    rng, width = np.random.RandomState(seed), 3
    spans = int(np.clip(round(0.15 * source / width), 1, len(SENTINELS)))
    if target < spans * (width + 1) + 1:
        raise ValueError(f"target is {target}, but {spans} spans need at least {spans * (width + 1) + 1} tokens; use "
                         f"a longer target")
    windows = _windows(corpus_ids(), count, source + spans * (width - 1), rng)
    cell = windows.shape[1] // spans  # one span somewhere in each equal part of the window, so that none overlap
    sources, targets = [], []
    for window in windows:
        kept: List[np.ndarray] = []
        said: List[np.ndarray] = []
        end = 0
        for i, sentinel in enumerate(SENTINELS[:spans]):
            start = cell * i + rng.randint(0, cell - width)
            kept += [window[end:start], np.array([sentinel])]
            end = start + width
            said += [np.array([sentinel]), window[start:end]]
        sources.append(np.concatenate(kept + [window[end:]]))
        targets.append(np.concatenate(said))
    return seq2seq(sources, targets, source, target, dtype)


def seq2seq(sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], source_length: int, target_length: int,
            dtype: str = "float32") -> Seq2SeqBatch:
    """Pad sequences of token ids of different lengths (cut where too long) into one `Seq2SeqBatch`."""
    count = len(sources)
    source = np.full([count, source_length], PAD, np.int32)
    target = np.full([count, target_length], PAD, np.int32)
    labels = np.full([count, target_length], PAD, np.int32)
    target[:, 0] = CLS
    for row, (ids, answer) in enumerate(zip(sources, targets)):
        ids, answer = ids[:source_length], answer[:target_length - 1]
        source[row, :len(ids)] = ids
        target[row, 1:len(answer) + 1] = answer
        labels[row, :len(answer)] = answer
        labels[row, len(answer)] = SEP
    return Seq2SeqBatch(source, (source != PAD).astype(dtype), target, labels, (labels != PAD).astype(dtype))


# -- handwritten digits ------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=None)
def _digits() -> Tuple[np.ndarray, np.ndarray]:
    """Pixels 0 to 16 `[1797, 8, 8]` and labels `[1797]` of scikit-learn's handwritten digits."""
    # Imported here because it takes a second and only images need it.
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    bunch = load_digits()
    return bunch.images, bunch.target.astype(np.int32)


def digit_examples(dtype: str = "float32") -> ImageBatch:
    """All 1,797 digits: images `[1797, 8, 8, 1]` between 0 and 1, labels `[1797]`."""
    pixels, labels = _digits()
    return ImageBatch((pixels / 16.0).astype(dtype)[..., None], labels)


def digit_features(dtype: str = "float32") -> ImageBatch:
    """All digits as rows of features `[1797, 64]`."""
    images, labels = digit_examples(dtype)
    return ImageBatch(images.reshape([len(images), -1]), labels)


def digit_gan_examples(noise: int, seed: int = 0, dtype: str = "float32") -> GanBatch:
    """All digits scaled to -1 ... 1, each with a normal noise vector `[noise]`."""
    images, _ = digit_examples(dtype)
    return GanBatch(images * 2.0 - 1.0, np.random.RandomState(seed).randn(len(images), noise).astype(dtype))


def digit_segmentation_examples(seed: int = 0, dtype: str = "float32") -> SegmentationBatch:
    """All digits with added noise; the label of a pixel says whether it carried ink (more than half) before."""
    images, _ = digit_examples(dtype)
    noisy = images + 0.3 * np.random.RandomState(seed).randn(*images.shape)
    return SegmentationBatch(noisy.astype(dtype), (images[..., 0] > 0.5).astype(np.int32))


def digit_records(fields: int, dtype: str = "float32") -> ClickBatch:
    """All digits as records: 8 row means, the grey levels (0 to 16) of `fields` middle pixels, and "5 or more"."""
    pixels, labels = _digits()
    rows = pixels.reshape(len(pixels), -1)
    start = (rows.shape[1] - fields) // 2
    return ClickBatch((pixels.mean(axis=2) / 16.0).astype(dtype), rows[:, start:start + fields].astype(np.int32),
                      (labels >= 5).astype(dtype))


def digit_captions(source: int, target: int, dtype: str = "float32") -> CaptionBatch:
    """All digits with a question and its answer in bytes: "which digit is this" and the digit's name."""
    images, labels = digit_examples(dtype)
    question = byte_ids("which digit is this")
    text = seq2seq([question] * len(labels), [byte_ids(DIGIT_NAMES[label]) for label in labels], source, target, dtype)
    return CaptionBatch(images, text.source, text.source_mask, text.target, text.labels, text.weights)
