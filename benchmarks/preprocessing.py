"""How much of a Keras model with preprocessing layers inside is divided, and whether it trains as the local one does.

    python -m benchmarks.preprocessing          # all models
    python -m benchmarks.preprocessing lstm     # those whose names contain a word

Small models in the style of Keras' examples begin with the preprocessing layers that these use: vectorization of text, look-ups,
hashing, normalization and augmentation.  Each is trained by `fit` for some epochs under data parallelism over two CPU devices,
and again without a plan, from the same seeds and with the same random numbers (`random: "local"`), in float64 where all layers
have it: Keras' random augmentation of images and spectrograms have float32 only.
"""
from __future__ import annotations

import re
import sys
from typing import Any, Callable, Dict, List, Tuple

import numpy as np
from rich.console import Console

from benchmarks.measure import Result, Spec, ask, main, table

BATCH, EXAMPLES, EPOCHS = 16, 48, 3
WORDS = 60
RANDOM = np.random.RandomState(0)
TEXT = np.array([" ".join(f"w{RANDOM.randint(50)}" for _ in range(RANDOM.randint(3, 9))) for _ in range(EXAMPLES)])
IMAGES, NUMBERS, SOUND = RANDOM.rand(EXAMPLES, 16, 16, 3), RANDOM.randn(EXAMPLES, 6), RANDOM.randn(EXAMPLES, 512)
LETTERS = np.array(list("abcdefg"))[RANDOM.randint(0, 7, (EXAMPLES, 3))].astype(object)
CLASSES = RANDOM.randint(0, 9, (EXAMPLES, 3))
LABELS = RANDOM.randint(0, 2, EXAMPLES).astype("float64")
Made = Tuple[Any, Any, Any]  # inputs, result, data


def dense(h: Any) -> Any:
    from keras import layers

    for _ in range(2):
        h = layers.Dense(32, "relu")(h)
    return layers.Dense(1, "sigmoid")(h)


def convolutions(h: Any) -> Any:
    from keras import layers

    for _ in range(2):
        h = layers.Conv2D(8, 3, activation="relu")(h)
    return dense(layers.Flatten()(h))


def of_text(body: Callable[[Any], Any], **settings: Any) -> Made:
    import keras
    from keras import layers

    inputs, vectors = keras.Input((), dtype="string"), layers.TextVectorization(max_tokens=WORDS, **settings)
    vectors.adapt(TEXT)
    return inputs, dense(body(vectors(inputs))), TEXT


def of_images(*augmented: Any) -> Made:
    import keras

    h = inputs = keras.Input((16, 16, 3))
    for layer in augmented:
        h = layer(h)
    return inputs, convolutions(h), IMAGES


def text_convolution() -> Made:
    from keras import layers

    return of_text(lambda h: layers.GlobalMaxPooling1D()(layers.Conv1D(32, 3, activation="relu")(layers.Embedding(WORDS, 16)(h))),
                   output_sequence_length=8)


def text_transformer() -> Made:
    from keras import layers

    def body(h: Any) -> Any:
        h = layers.Embedding(WORDS, 32)(h)
        return layers.GlobalAveragePooling1D()(layers.LayerNormalization()(h + layers.MultiHeadAttention(2, 16)(h, h)))

    return of_text(body)


def text_lstm() -> Made:
    """Lines of open length, whose padding is masked."""
    from keras import layers

    return of_text(lambda h: layers.Bidirectional(layers.LSTM(16))(layers.Embedding(WORDS, 16, mask_zero=True)(h)))


def text_multi_hot() -> Made:
    return of_text(lambda h: h, output_mode="multi_hot")


def text_tf_idf_of_pairs() -> Made:
    return of_text(lambda h: h, output_mode="tf_idf", ngrams=2)


def text_pairs() -> Made:
    from keras import layers

    return of_text(lambda h: layers.GlobalAveragePooling1D()(layers.Embedding(WORDS, 32)(h)), ngrams=2, output_sequence_length=8)


def text_characters_gru() -> Made:
    from keras import layers

    return of_text(lambda h: layers.GRU(16)(layers.Embedding(WORDS, 16)(h)), split="character", output_sequence_length=12)


def structured_data() -> Made:
    """Words and integers are looked up, numbers normalized."""
    import keras
    from keras import layers

    words, classes, numbers = (keras.Input((3,), dtype="string"), keras.Input((3,), dtype="int64"), keras.Input((6,)))
    of_words, of_classes, normal = (layers.StringLookup(output_mode="multi_hot"), layers.IntegerLookup(output_mode="count"),
                                    layers.Normalization())
    for layer, data in ((of_words, LETTERS), (of_classes, CLASSES), (normal, NUMBERS)):
        layer.adapt(data)
    h = [keras.ops.cast(of_words(words), "float64"), keras.ops.cast(of_classes(classes), "float64"), normal(numbers)]
    return [words, classes, numbers], dense(layers.Concatenate()(h)), (LETTERS, CLASSES, NUMBERS)


def hashed_and_crossed() -> Made:
    import keras
    from keras import layers

    words, other = keras.Input((3,), dtype="string"), keras.Input((1,), dtype="string")
    crossed = layers.HashedCrossing(20, output_mode="one_hot")((words[:, :1], other))
    h = [layers.Flatten()(layers.Embedding(20, 8)(layers.Hashing(20)(words))),
         layers.Flatten()(keras.ops.cast(crossed, "float64"))]
    return [words, other], dense(layers.Concatenate()(h)), (LETTERS, LETTERS[:, 2:])


def binned_and_encoded() -> Made:
    import keras
    from keras import layers

    numbers, classes = keras.Input((6,)), keras.Input((3,), dtype="int64")
    bins = layers.Discretization(num_bins=5)
    bins.adapt(NUMBERS)
    h = [layers.Flatten()(layers.Embedding(6, 8)(bins(numbers))), layers.CategoryEncoding(10, output_mode="multi_hot")(classes)]
    return [numbers, classes], dense(layers.Concatenate()(h)), (NUMBERS, CLASSES)


def images_turned() -> Made:
    from keras import layers

    return of_images(layers.Rescaling(2.0), layers.RandomFlip(), layers.RandomRotation(0.1), layers.RandomZoom(0.1))


def images_cropped() -> Made:
    from keras import layers

    return of_images(layers.RandomCrop(12, 12), layers.RandomTranslation(0.1, 0.1), layers.RandomContrast(0.1))


def images_resized() -> Made:
    from keras import layers

    normal = layers.Normalization()
    normal.adapt(IMAGES)
    return of_images(normal, layers.Resizing(12, 12), layers.CenterCrop(10, 10))


def images_coloured() -> Made:
    from keras import layers

    return of_images(layers.RandomBrightness(0.1, (0, 1)), layers.RandomHue(0.1, (0, 1)), layers.RandomSaturation(0.1, (0, 1)))


def spectrograms() -> Made:
    import keras
    from keras import layers

    inputs = keras.Input((512,))
    h = layers.Rescaling(0.02)(layers.MelSpectrogram(num_mel_bins=8, fft_length=64, sequence_stride=32)(inputs))  # of decibels
    return inputs, dense(layers.Flatten()(h)), SOUND


MODELS = {made.__name__: made for made in (
    text_convolution, text_transformer, text_lstm, text_multi_hot, text_tf_idf_of_pairs, text_pairs, text_characters_gru,
    structured_data, hashed_and_crossed, binned_and_encoded, images_turned, images_cropped, images_resized, images_coloured,
    spectrograms)}


def type_of(name: str) -> str:
    return "float32" if name in ("images_turned", "images_cropped", "images_coloured", "spectrograms") else "float64"


def trained(name: str) -> Dict[str, List[float]]:
    """Losses of all epochs, and the sums of all trained variables."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    inputs, result, data = MODELS[name]()
    model = keras.Model(inputs, result)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "binary_crossentropy")
    losses = model.fit(tf.data.Dataset.from_tensor_slices((data, LABELS)).batch(BATCH), epochs=EPOCHS, verbose=0).history["loss"]
    return {"losses": losses, "sums": [float(np.sum(each)) for each in model.trainable_variables]}


def worker(spec: Spec) -> Result:
    import whale_tf as wh

    if spec["parallel"]:
        wh.init({"random": "local"}, cluster="cpu:2")
    import keras

    keras.config.set_floatx(type_of(spec["model"]))
    found: Result = trained(spec["model"])
    if spec["parallel"]:
        explained = wh.explain()
        share = re.search(r"([\d.]+)% of the floating-point", explained)
        found["share"] = float(share.group(1)) if share else 0.0
        once = re.search(r"(\d+) ops need all examples", explained)
        found["once"] = int(once.group(1)) if once else 0
    return found


def report(console: Console) -> None:
    rows = []
    for name in MODELS:
        if any(word in name for word in sys.argv[1:] or [""]):
            local, ours = (ask(__file__, {"model": name, "parallel": parallel}) for parallel in (False, True))
            far = [float(np.abs(np.subtract(ours[key], local[key])).max()) for key in ("losses", "sums")]
            rows.append([name, type_of(name), f"{ours['share']:.3g}%", str(ours["once"]), f"{local['losses'][-1]:.6f}",
                         *(f"{each:.1e}" for each in far)])
            console.print(" ".join(rows[-1]), highlight=False)
    console.print(table(f"data parallelism over 2 devices, {BATCH} examples, {EPOCHS} epochs of {EXAMPLES // BATCH} steps",
                        ["model", "type", "FLOPs divided", "ops once", "last loss", "losses differ", "variables differ"], rows))


if __name__ == "__main__":
    main(__file__, worker, report)
