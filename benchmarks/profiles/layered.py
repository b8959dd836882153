"""Models that are defined by layers, as planners in papers see them.

Sizes are those of the papers' benchmarks: DAPPLE (section VI-A, Tables I and II), AMP (section 4.3), Rhino (Tables 1 to 4).
"""
from __future__ import annotations

from dataclasses import replace
from typing import Dict, List, Sequence

from benchmarks.profiles import convolutional, transformers
from whale_tf.profiler.model_profile import LayerProfile, ModelProfile
from whale_tf.simulator.model_graph import OPTIMIZERS


def profile(name: str, layers: Sequence[LayerProfile], granularity: int, optimizer: str, source: str) -> ModelProfile:
    return ModelProfile(name=name, source=source, batch_granularity=granularity, optimizer=optimizer,
                        optimizer_bytes_per_parameter_byte=OPTIMIZERS[optimizer].state_bytes / 4, layers=tuple(layers))


def dapple() -> List[ModelProfile]:
    """DAPPLE's own models, with ``@dapple`` if the zoo has a model of that name.  BERT reads 384 tokens and answers questions
    (the zoo's reads 512 and has its vocabulary at every position), 3 x 3 convolutions are Winograd's, every element-wise op of
    TensorFlow 1 keeps its result, and a mini-batch below the profile batch takes as long as a whole one.

    Batch granularity: the profile batch of Table II.  GNMT: 25 tokens per sentence, the length for which the boundary agrees
    with Table I (hidden states and context of 64 sentences, forward and back)."""
    text, image = "DAPPLE section VI-A, Tables I and II: ", "DAPPLE section VI-A, 224 x 224: "
    return [
        profile("bert-48@dapple", transformers.bert(48, 384, 1024, 16, 30522), 2, "adam", text + "48 layers, S 384"),
        profile("bert-large@dapple", transformers.bert(24, 384, 1024, 16, 30522), 2, "adam", "DAPPLE Table VII, S 384"),
        profile("xlnet-36", transformers.xlnet(36, 512, 1024, 16, 32000), 1, "adam", text + "36 layers, S 512"),
        profile("gnmt-16", transformers.gnmt(25, 1024, 36560), 64, "adam", text + "8 + 8 LSTM layers, S 25"),
        profile("vgg-19@dapple", convolutional.vgg19(1000), 32, "sgd", image + "VGG-19"),
        profile("resnet-50@dapple", convolutional.residual("resnet", (3, 4, 6, 3), 64, 1, 1000), 128, "momentum",
                image + "ResNet-50"),
        profile("amoebanet-36", convolutional.amoebanet(36, 512), 1, "rmsprop", image + "AmoebaNet-D, 36 cells, 933M"),
    ]


def transgan() -> List[LayerProfile]:
    """AMP sections 4.3 and 6.5.3: 56 layers, of which 3 to 14 have 81 tokens of 1,024, and 41 to 52 have 72 x 72 tokens of 16,
    which attend to a grid of 16 x 16 (Jiang et al. 2021, section 3.2)."""
    width = transformers.FLOAT * 81 * 1024
    layers = [transformers.nothing(f"layer_{i}", width) for i in range(56)]
    layers[0] = transformers.embedding("layer_0", 81, 1024, 256, normalised=False)
    for i in range(12):
        layers[3 + i] = transformers.transformer(f"layer_{3 + i}", 81, 1024, 4096, 4)
        layers[41 + i] = transformers.transformer(f"layer_{41 + i}", 72 * 72, 16, 64, 4, span=16 * 16)
    layers[55] = replace(layers[55], output_bytes=transformers.FLOAT * 72 * 72 * 3)
    return layers


def amp() -> List[ModelProfile]:
    return [
        profile("gpt2-24", amp_gpt2(), 1, "adam", "AMP section 4.3: GPT-2, 24 layers of 1,024, S 1,024; 30 layers as there"),
        profile("transgan", transgan(), 1, "adam", "AMP section 4.3: TransGAN generator, 12 + 12 transformer layers"),
    ]


def amp_gpt2() -> List[LayerProfile]:
    """AMP section 6.5.1: 30 layers, of which 24 are transformer layers and the others look-ups, normalisation, projection and
    loss.

    Megatron's layers keep less than TensorFlow's: tensors of 34 S h + 5 heads S^2 bytes in 16 bits, including dropout masks of
    one byte (Korthikanti et al. 2022, section 4.1), so 66 S h + 9 heads S^2 in float32.
    """
    word, position, *body, projection = transformers.gpt(24, 1024, 1024, 16, 52256)
    body = [replace(layer, activation_bytes=1024 * (66 * 1024 + 9 * 16 * 1024)) for layer in body]
    width = transformers.FLOAT * 1024 * 1024
    return [word, position, *body, transformers.nothing("cast", width), transformers.nothing("final_norm", width), projection,
            transformers.nothing("loss", transformers.FLOAT)]


def whale() -> List[ModelProfile]:
    return [profile("t5-large", transformers.t5(24, 512, 114, 1024, 4096, 16, 32128), 1, "adam",
                    "Whale section 5.2 (Fig. 18); sizes of T5-Large: Raffel et al. 2020, section 3.7, spans of section 3.1.4")]


def rhino() -> List[ModelProfile]:
    made = [profile(name, transformers.gpt(layers, 1024, hidden, heads, 51200), 1, "adam", "Rhino Table 1, S 1,024")
            for name, layers, hidden, heads in (
                ("gpt-medium", 24, 1024, 16), ("gpt-large", 24, 1536, 16), ("gpt-xl", 24, 2048, 32),
                ("gpt-2.7b", 32, 2560, 32), ("gpt-6.7b", 32, 4096, 32))]
    made += [profile(name, transformers.moe(layers, 1024, hidden, 8 * hidden, 16, experts, 32000), 1, "adam",
                     "Rhino Table 2, S 1,024")
             for name, layers, hidden, experts in (
                 ("moe-8e-380m", 8, 768, 8), ("moe-8e-760m", 16, 768, 8), ("moe-16e-1.3b", 16, 768, 16),
                 ("moe-16e-2.4b", 16, 1024, 16), ("moe-32e-10b", 16, 1536, 32))]
    made += [profile(name, convolutional.residual("wide-resnet", blocks, channels, width, 1024), 1, "adam", "Rhino Table 4")
             for name, blocks, channels, width in (
                 ("wide-resnet-1.3b", (3, 4, 6, 3), 320, 2), ("wide-resnet-2.6b", (3, 4, 6, 3), 448, 2),
                 ("wide-resnet-6b", (3, 4, 6, 3), 640, 2), ("wide-resnet-12b", (3, 4, 23, 3), 320, 12))]
    return made + [
        profile("vgg-19-1m", convolutional.vgg19(1000000), 32, "sgd", "Rhino Table 3: VGG-19 with a million classes"),
        profile("dnabert", transformers.bert(12, 512, 1024, 16, 4101), 2, "adam",
                "Rhino Table 3: DNABERT, 162M parameters (12 layers of 1,024, 6-mers, S 512)"),
        profile("unet", convolutional.unet(64), 1, "adam", "Rhino Table 3: U-Net, 256 x 256"),
    ]


def every() -> Dict[str, ModelProfile]:
    return {made.name: made for made in dapple() + amp() + rhino() + whale()}
