"""The data is real, deterministic, and what its description says."""
from __future__ import annotations

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from models import data


def _same(left: tuple, right: tuple) -> bool:
    return type(left) is type(right) and all(np.array_equal(a, b) for a, b in zip(left, right))


def test_batches_show_every_example_once_per_epoch() -> None:
    examples = data.ImageBatch(np.arange(10), np.arange(10) * 2)
    stream = data.batches(examples, 5, seed=3)
    for _ in range(3):
        epoch = [next(stream), next(stream)]
        assert sorted(np.concatenate([batch.images for batch in epoch])) == list(range(10))
        assert all(np.array_equal(batch.labels, batch.images * 2) for batch in epoch)


def test_batches_keep_the_ragged_last_batch_only_on_request() -> None:
    examples = data.ImageBatch(np.arange(10), np.arange(10))
    sizes = [len(next(stream).images) for stream in [data.batches(examples, 4)] for _ in range(4)]
    assert sizes == [4, 4, 4, 4]
    stream = data.batches(examples, 4, drop_remainder=False)
    assert [len(next(stream).images) for _ in range(4)] == [4, 4, 2, 4]


def test_batches_with_one_seed_are_equal_and_with_another_are_not() -> None:
    examples = data.ImageBatch(np.arange(100), np.arange(100))
    first = [next(data.batches(examples, 50, seed)) for seed in (1, 1, 2)]
    assert _same(first[0], first[1])
    assert not _same(first[0], first[2])


def test_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_size is 11, but there are only 10 examples"):
        next(data.batches(data.ImageBatch(np.arange(10), np.arange(10)), 11))


def test_dataset_holds_the_same_examples_with_a_static_batch_size(graph: tf.Graph) -> None:
    examples = data.masked_lm_examples(12, seq=12, predictions=2)
    element = tf.data.make_one_shot_iterator(data.dataset(examples, 4)).get_next()
    assert isinstance(element, data.MaskedLmBatch)
    assert element.tokens.shape.as_list() == [4, 12]
    with tf.Session() as session:
        batches = [session.run(element) for _ in range(4)]
    whole = data.MaskedLmBatch(*[np.concatenate(field) for field in zip(*batches[:3])])
    assert _same(whole, examples)
    assert _same(batches[3], batches[0])


def test_dataset_without_dropping_has_an_unknown_batch_size(graph: tf.Graph) -> None:
    examples = data.ImageBatch(np.arange(5), np.arange(5))
    element = tf.data.make_one_shot_iterator(data.dataset(examples, 4, seed=1, drop_remainder=False)).get_next()
    assert element.images.shape.as_list() == [None]
    with tf.Session() as session:
        values = [session.run(element).images for _ in range(2)]
    assert [len(value) for value in values] == [4, 1]
    assert sorted(np.concatenate(values)) == list(range(5))


def test_corpus_is_this_python_installation_s_text() -> None:
    text = data.corpus()
    assert len(text) > 500000
    assert "Python Software Foundation" in text or "import" in text
    assert data.byte_ids("az").tolist() == [ord("a") + data.NUM_SPECIAL, ord("z") + data.NUM_SPECIAL]


def test_words_are_ranked_by_frequency() -> None:
    ids = data.corpus_ids(1000)
    counts = np.bincount(ids, minlength=1000)
    assert ids.max() == 999
    assert counts[data.UNKNOWN] > 0
    assert (np.diff(counts[data.NUM_SPECIAL:]) <= 0).all()
    assert counts[[data.PAD, data.CLS, data.SEP, data.MASK]].sum() == 0


def test_language_model_labels_are_the_next_tokens() -> None:
    batch = data.language_model_examples(20, 16)
    assert batch.tokens.shape == batch.labels.shape == (20, 16)
    assert np.array_equal(batch.tokens[:, 1:], batch.labels[:, :-1])


def test_masked_lm_examples_hide_tokens_as_bert_does() -> None:
    count, seq, predictions = 2000, 32, 5
    batch = data.masked_lm_examples(count, seq, predictions, seed=5)
    rows, used = np.arange(count)[:, None], batch.weights > 0
    assert _same(batch, data.masked_lm_examples(count, seq, predictions, seed=5))
    # special tokens stand where they should and are never masked
    middle = (seq - 3) // 2 + 1
    assert (batch.tokens[:, 0] == data.CLS).all()
    assert (batch.tokens[:, [middle, seq - 1]] == data.SEP).all()
    assert not np.isin(batch.positions[used], [0, middle, seq - 1]).any()
    assert (batch.segments[:, :middle + 1] == 0).all() and (batch.segments[:, middle + 1:] == 1).all()
    # used positions come first, rise, and number 15% of the sequence within their bounds
    assert (np.diff(batch.weights, axis=1) <= 0).all() and used[:, 0].all()
    assert (np.diff(batch.positions, axis=1)[used[:, 1:]] > 0).all()
    assert (batch.positions[~used] == 0).all()
    assert used.sum(axis=1).min() == 1 and used.sum(axis=1).max() == predictions
    # 80% MASK, 10% random, 10% unchanged
    shown, labels = batch.tokens[rows, batch.positions][used], batch.labels[used]
    assert abs((shown == data.MASK).mean() - 0.8) < 0.02
    assert abs((shown == labels).mean() - 0.1) < 0.02
    # putting the labels back gives text of the corpus
    restored = batch.tokens.copy()
    restored[np.nonzero(used)[0], batch.positions[used]] = labels
    text = data.corpus_ids().astype(np.uint16).tobytes()
    first = restored[:, 1:middle].astype(np.uint16)
    assert all(row.tobytes() in text for row in first[:20])
    pairs = np.concatenate([first, restored[:, middle + 1:-1].astype(np.uint16)], axis=1)
    assert all(row.tobytes() in text for row in pairs[batch.next_sentence == 1][:20])
    assert abs(batch.next_sentence.mean() - 0.5) < 0.05


def test_masked_lm_refuses_a_sequence_that_is_too_short() -> None:
    with pytest.raises(ValueError, match="seq is 7, but 5 masked positions need at least 8 tokens"):
        data.masked_lm_examples(1, seq=7, predictions=5)


def test_true_case_pairs_a_folded_line_with_the_line() -> None:
    batch = data.true_case_examples(50, 16, 16)
    for source, target, labels, weights in zip(batch.source, batch.target, batch.labels, batch.weights):
        length = int(weights.sum())
        answer = bytes((labels[:length - 1] - data.NUM_SPECIAL).astype(np.uint8)).decode("utf-8")
        question = bytes((source[source != data.PAD] - data.NUM_SPECIAL).astype(np.uint8)).decode("utf-8")
        assert question == answer.lower() != answer
        assert labels[length - 1] == data.SEP and target[0] == data.CLS
        assert np.array_equal(target[1:length], labels[:length - 1])
        assert (labels[length:] == data.PAD).all() and (weights[length:] == 0).all()
    assert np.array_equal(batch.source_mask, batch.source != data.PAD)


def test_true_case_refuses_lengths_without_any_line() -> None:
    with pytest.raises(ValueError, match="no line of text has 4 to 2 bytes"):
        data.true_case_examples(1, 3, 3)


def test_span_corruption_target_says_what_the_source_lacks() -> None:
    batch = data.span_corruption_examples(50, 30, 16)
    text = data.corpus_ids().astype(np.uint16).tobytes()
    for source, labels, weights in zip(batch.source, batch.labels, batch.weights):
        said = labels[:int(weights.sum()) - 1]
        assert np.isin(said, data.SENTINELS).sum() == np.isin(source, data.SENTINELS).sum() == 2
        restored = []
        for token in source:
            if token in data.SENTINELS:
                start = int(np.nonzero(said == token)[0][0]) + 1
                restored += said[start:start + 3].tolist()
            else:
                restored.append(token)
        assert np.array(restored, np.uint16).tobytes() in text


def test_span_corruption_refuses_a_target_that_is_too_short() -> None:
    with pytest.raises(ValueError, match="target is 8, but 2 spans need at least 9 tokens"):
        data.span_corruption_examples(1, 30, 8)


@pytest.mark.slow
def test_digits_in_all_their_forms() -> None:
    images, labels = data.digit_examples("float64")
    assert images.shape == (1797, 8, 8, 1) and images.dtype == np.float64
    assert images.min() == 0.0 and images.max() == 1.0 and np.bincount(labels).min() > 170
    assert np.array_equal(data.digit_features("float64").images, images.reshape([1797, 64]))
    records = data.digit_records(6)
    assert records.dense.shape == (1797, 8) and records.categories.shape == (1797, 6)
    assert records.categories.max() == 16 and np.array_equal(records.labels, labels >= 5)
    segmentation = data.digit_segmentation_examples()
    assert segmentation.labels.shape == (1797, 8, 8) and 0.2 < segmentation.labels.mean() < 0.5
    assert abs((segmentation.images - images).std() - 0.3) < 0.01
    assert data.digit_gan_examples(4).images.min() == -1.0
    captions = data.digit_captions(20, 6)
    words = [bytes((row[row >= data.NUM_SPECIAL] - data.NUM_SPECIAL).astype(np.uint8)).decode()
             for row in captions.labels[:20]]
    assert words == [data.DIGIT_NAMES[label] for label in labels[:20]]
