"""Training runs that NVIDIA published: throughputs in the READMEs of NVIDIA/DeepLearningExamples, commit 729963d.

All use Horovod, and XLA except where a script says otherwise.  BERT and ELECTRA send gradients in 16 bits under mixed precision
(``hvd.Compression.fp16``), convolutional nets do not.

- :data:`RUNS`: resnet50v1.5 and resnext101-32x4d (20.06-tf1; their hours of training tell that the tables are of runs under
  XLA), TensorFlow2/LanguageModeling/BERT, pre-training by LAMB (21.02-tf2).
- :data:`TRAINED`: TensorFlow/LanguageModeling/BERT (20.06-tf1) and TensorFlow2/LanguageModeling/BERT, fine-tuning.  The command
  that the second README gives for fine-tuning in float32 ("without XLA", with the batch of its table) has no XLA, and so has the
  first one's until the commit before the tables (58a3ed6); its rates on a DGX-1 of 16 GB stayed the same in that commit (7.35,
  26.38 and 50.17 sentences/s before, 7.36, 26.64 and 52.39 after).  The files in scripts/configs ask for XLA in every precision.
  So these runs count as op by op in float32, and in TF32 with TensorFlow 2, whose table calls it FP32.
- :data:`ELECTRA`: TensorFlow2/LanguageModeling/ELECTRA (20.07-tf2).  Fine-tuning in float32 and TF32 runs op by op: its
  scripts/run_squad.sh asks for XLA under mixed precision alone.
- :data:`UNET`: UNet_Medical (20.06-tf1, and 21.02-tf2), 572 x 572 pixels.
"""

from __future__ import annotations

from typing import List, Mapping, NamedTuple, Optional, Tuple

from benchmarks.points import Point, data_parallel
from whale_tf.cluster import Cluster
from whale_tf.simulator import built_in_model
from whale_tf.simulator.model_graph import Builder, ModelGraph, Optimizer
from whale_tf.simulator.zoo import transformers, vision
from whale_tf.simulator.zoo.transformers import Sizes, transformer

TF1, TF2 = "TensorFlow 1", "TensorFlow 2"
CONTAINERS = {TF1: "20.06", TF2: "21.02"}  # of the runs below, except ELECTRA's
ELECTRAS_CONTAINER = "20.07"
# (model, tokens, precision, cluster, batch of a GPU, {GPUs: (samples/s, micro-batches)})
RUNS = (
    ("resnet-50", 0, "fp32", "V100-16GB:8", 128, {1: (412.0, 1), 8: (3170.0, 1)}),
    ("resnet-50", 0, "fp16", "V100-16GB:8", 256, {1: (1270.0, 1), 8: (9510.0, 1)}),
    ("resnet-50", 0, "fp32", "V100-32GB:16", 128, {1: (432.0, 1), 16: (6500.0, 1)}),
    ("resnet-50", 0, "fp16", "V100-32GB:16", 256, {1: (1300.0, 1), 16: (17250.0, 1)}),
    ("resnet-50", 0, "tf32", "A100-40GB:8", 256, {1: (909.0, 1), 8: (7000.0, 1)}),
    ("resnet-50", 0, "fp16", "A100-40GB:8", 256, {1: (2375.0, 1), 8: (17400.0, 1)}),
    ("resnext-101", 0, "fp32", "V100-16GB:8", 64, {1: (166.0, 1), 8: (1210.0, 1)}),
    ("resnext-101", 0, "fp16", "V100-16GB:8", 128, {1: (566.0, 1), 8: (4160.0, 1)}),
    ("resnext-101", 0, "fp32", "V100-32GB:16", 64, {1: (170.0, 1), 16: (2500.0, 1)}),
    ("resnext-101", 0, "fp16", "V100-32GB:16", 128, {1: (572.0, 1), 16: (7750.0, 1)}),
    ("resnext-101", 0, "tf32", "A100-40GB:8", 128, {1: (371.0, 1), 8: (2854.0, 1)}),
    ("resnext-101", 0, "fp16", "A100-40GB:8", 256, {1: (1132.0, 1), 8: (8500.0, 1)}),
    ("bert-large", 128, "fp32", "V100-32GB:16", 32, {1: (49.97, 2048), 4: (194.02, 512), 8: (367.9, 256), 16: (762.22, 128)}),
    ("bert-large", 128, "fp16", "V100-32GB:16", 60, {1: (206.5, 1024), 4: (789.75, 256), 8: (1561.77, 128), 16: (3077.99, 64)}),
    ("bert-large", 512, "fp32", "V100-32GB:16", 6, {1: (11.06, 5120), 4: (43.05, 1280), 8: (85.51, 640)}),
    ("bert-large", 512, "fp16", "V100-32GB:16", 10, {1: (40.95, 3072), 4: (158.5, 768), 8: (312.03, 384), 16: (614.94, 192)}),
    ("bert-large", 128, "tf32", "A100-80GB:8", 176, {1: (282.98, 512), 8: (1944.77, 64)}),
    ("bert-large", 128, "fp16", "A100-80GB:8", 312, {1: (485.59, 256), 8: (3799.24, 32)}),
    ("bert-large", 512, "tf32", "A100-80GB:8", 22, {1: (54.92, 1536), 8: (427.39, 192)}),
    ("bert-large", 512, "fp16", "A100-80GB:8", 40, {1: (96.52, 768), 8: (649.69, 96)}),
)


class Trained(NamedTuple):
    """A table of a README.

    Attributes:
        tokens: of an example; 384: fine-tuning for SQuAD, otherwise pre-training.
        precision: of the runs beside those in mixed precision.
        batches: of a GPU, mixed and in ``precision``.
        failed: the batch that ran out of memory in ``precision``.
        rates: GPUs -> micro-batches and samples/s, mixed and in ``precision``.
        xla: whether the runs in ``precision`` are under XLA.
    """

    source: str
    tokens: int
    cluster: str
    precision: str
    batches: Tuple[int, int]
    failed: Optional[int]
    rates: Mapping[int, Tuple[Tuple[int, int], Tuple[Optional[float], Optional[float]]]]
    xla: bool = True


ONE = (1, 1)
TRAINED = (
    Trained(TF1, 128, "V100-16GB:8", "fp32", (16, 8), 16, {
        1: ((4096, 8192), (134.34, 39.43)), 4: ((1024, 2048), (449.68, 152.33)), 8: ((512, 1024), (1001.39, 285.79))}),
    Trained(TF1, 512, "V100-16GB:8", "fp32", (4, 2), 4, {
        1: ((8192, 16384), (28.72, 9.80)), 4: ((2048, 4096), (109.96, 35.32)), 8: ((1024, 2048), (190.65, 69.53))}),
    Trained(TF1, 384, "V100-16GB:8", "fp32", (4, 2), 4, {
        1: (ONE, (29.74, 7.36)), 4: (ONE, (97.28, 26.64)), 8: (ONE, (189.77, 52.39))}, xla=False),
    Trained(TF1, 128, "V100-32GB:16", "fp32", (64, 32), 64, {  # on one GPU in float32 the file repeats another row's figure
        1: ((1024, 2048), (188.04, None)), 4: ((256, 512), (790.89, 193.08)), 8: ((128, 256), (1556.89, 386.89)),
        16: ((64, 128), (3081.69, 761.92))}),
    Trained(TF1, 512, "V100-32GB:16", "fp32", (8, 8), None, {
        1: ((4096, 4096), (35.32, 11.67)), 4: ((1024, 1024), (128.98, 42.84)), 8: ((512, 512), (274.04, 86.78)),
        16: ((256, 256), (513.43, 173.26))}),
    Trained(TF1, 384, "V100-32GB:16", "fp32", (24, 10), 24, {
        1: (ONE, (55.28, 11.15)), 4: (ONE, (199.53, 42.91)), 8: (ONE, (341.55, 85.08)), 16: (ONE, (683.37, 156.29))}, xla=False),
    Trained(TF1, 128, "A100-40GB:8", "tf32", (64, 64), None, {
        1: ((1024, 1024), (356.845, 238.10)), 4: ((256, 256), (1422.25, 952.39)), 8: ((128, 128), (2871.89, 1889.71))}),
    Trained(TF1, 512, "A100-40GB:8", "tf32", (16, 8), 16, {
        1: ((2048, 4096), (70.856, 39.96)), 4: ((512, 1024), (284.912, 160.16)), 8: ((256, 512), (572.112, 316.51))}),
    Trained(TF1, 384, "A100-40GB:8", "tf32", (32, 16), 32, {
        1: (ONE, (102.26, 61.364)), 4: (ONE, (366.353, 223.187)), 8: (ONE, (767.071, 440.47))}),
    Trained(TF2, 384, "V100-16GB:8", "fp32", (6, 3), 6, {
        1: (ONE, (39.10, 9.85)), 4: (ONE, (128.48, 36.52)), 8: (ONE, (255.36, 73.03))}, xla=False),
    Trained(TF2, 384, "V100-32GB:8", "fp32", (12, 8), 12, {
        1: (ONE, (47.06, 11.11)), 4: (ONE, (165.26, 42.84)), 8: (ONE, (330.29, 85.91))}, xla=False),
    Trained(TF2, 384, "A100-80GB:8", "tf32", (76, 38), 76, {1: (ONE, (134.22, 43.9)), 8: (ONE, (1048.23, 341.31))}, xla=False),
)
# BERT-base's blocks: (tokens, cluster, precision, batches of a GPU in it and mixed, {GPUs: (samples/s in it and mixed,
# micro-batches of both)}); 384 tokens: fine-tuning for SQuAD.
ELECTRA = (
    (128, "V100-16GB:8", "fp32", (40, 88), {1: ((116.0, 444.0), (1689, 768)), 8: ((920.0, 3475.0), (211, 96))}),
    (512, "V100-16GB:8", "fp32", (6, 12), {1: ((24.0, 84.0), (4608, 2304)), 8: ((190.0, 656.0), (576, 288))}),
    (384, "V100-16GB:8", "fp32", (8, 16), {1: ((35.0, 154.0), ONE), 8: ((268.0, 1051.0), ONE)}),
    (128, "V100-32GB:16", "fp32", (88, 176), {
        1: ((128.0, 500.0), (768, 384)), 8: ((1011.0, 3916.0), (96, 48)), 16: ((2018.0, 7773.0), (48, 24))}),
    (512, "V100-32GB:16", "fp32", (12, 24), {
        1: ((27.0, 96.0), (2304, 1152)), 8: ((213.0, 754.0), (288, 144)), 16: ((426.0, 1506.0), (144, 72))}),
    (384, "V100-32GB:16", "fp32", (16, 16), {
        1: ((40.0, 184.0), ONE), 8: ((311.0, 1289.0), ONE), 16: ((626.0, 2594.0), ONE)}),
    (128, "A100-40GB:8", "tf32", (88, 176), {1: ((533.0, 955.0), (768, 384)), 8: ((4202.0, 7512.0), (96, 48))}),
    (512, "A100-40GB:8", "tf32", (12, 24), {1: ((90.0, 171.0), (2304, 1152)), 8: ((716.0, 1347.0), (288, 144))}),
    (384, "A100-40GB:8", "tf32", (32, 32), {1: ((107.0, 317.0), ONE), 8: ((828.0, 2221.0), ONE)}),
)
# (TensorFlow, cluster, precision, batch of a GPU, {GPUs: images/s in it and mixed})
UNET = (
    (TF1, "V100-16GB:8", "fp32", 1, {1: (15.70, 39.62), 8: (102.52, 212.51)}),
    (TF1, "V100-16GB:8", "fp32", 8, {1: (18.85, 60.28), 8: (141.75, 403.88)}),
    (TF1, "A100-40GB:8", "tf32", 1, {1: (29.81, 64.22), 8: (169.62, 293.31)}),
    (TF1, "A100-40GB:8", "tf32", 8, {1: (40.50, 120.08), 8: (304.64, 738.64)}),
    (TF2, "V100-16GB:8", "fp32", 1, {1: (16.92, 39.63), 8: (120.90, 225.27)}),
    (TF2, "V100-16GB:8", "fp32", 8, {1: (19.40, 60.65), 8: (137.11, 419.99)}),
    (TF2, "A100-80GB:8", "tf32", 1, {1: (46.88, 75.04), 8: (298.91, 384.27)}),
    (TF2, "A100-80GB:8", "tf32", 8, {1: (63.33, 141.03), 8: (470.50, 1000.89)}),
)
PREDICTED = {128: 20, 512: 80}  # positions that pre-training predicts
# ELECTRA's optimization.py: one kernel of Adam 7, two products and a subtraction for the decay 7, clipping 3
ADAM_WITH_DECAY = Optimizer("Adam with decay", 8, 17, 7, 4, 9)


# ---- models that are not built in ------------------------------------------------------------------------------------------


def bert_large(tokens: int, batch: int) -> ModelGraph:
    """BERT-Large: pre-training by LAMB; with 384 tokens fine-tuning by Adam, which predicts where the answer starts and ends."""
    optimizer = "lamb" if tokens in PREDICTED else "adamw"
    return transformer("bert-large", batch, 24, 1024, 16, tokens, 30522, pre_norm=False, predicted=PREDICTED.get(tokens, 2),
                       optimizer=optimizer)


def electra(tokens: int, batch: int) -> ModelGraph:
    """ELECTRA's base size: a generator of a third of the width fills masked positions in, and the discriminator, BERT-base, says
    of every token whether it did; with 384 tokens the discriminator alone is fine-tuned by Adam (Clark et al. 2020)."""
    if tokens not in PREDICTED:
        return transformer("electra", batch, 12, 768, 12, tokens, 30522, pre_norm=False, predicted=2, optimizer=ADAM_WITH_DECAY)
    vocabulary = 30528  # run_pretraining.py rounds it up to a multiple of 8
    b = Builder("electra", batch, optimizer="lamb")
    sizes = Sizes(12, 768, 12, tokens, vocabulary, pre_norm=False)
    masked, narrow = PREDICTED[tokens], sizes._replace(hidden=256, heads=4)

    def dense(name: str, x: int, units: int) -> int:
        weight = b.parameter(name + "_w", "h o", (b.tensors[x].shape[-1], units))
        return b.bias(name + "_bias", b.op(name, "matmul", "b s h, h o -> b s o", (x, weight)))

    with b.scope("generator_embedding"):
        x, table = transformers.look_up(b, 768, tokens, vocabulary)
        x = dense("projection", b.layer_norm("norm", x), 256)
    for layer in range(12):
        with b.scope(f"generator{layer}"):
            x = transformers.block(b, x, narrow)
    with b.scope("generator_head"):
        x = b.op("gather", "concat", "b s h -> b t h", (x,), float(batch * masked * 256), whole=("s", "t"), sizes={"t": masked})
        x = b.layer_norm("norm", b.pointwise("gelu", "activation", dense("transform", x, 768)))
        transformers.token_loss(b, x, vocabulary, table)
    with b.scope("embedding"):
        ids = b.op("sample", "wire", "b t h -> b s", (x,), 0.0, whole=("t", "h", "s"), sizes={"s": tokens})
        tokens_w = b.parameter("tokens", "v h", (vocabulary, 768))
        x = b.op("lookup", "embedding", "b s, v h -> b s h", (ids, tokens_w), float(batch * tokens * 768), split="v")
        x = b.layer_norm("norm", x)
    for layer in range(12):
        with b.scope(f"block{layer}"):
            x = transformers.block(b, x, sizes)
    with b.scope("head"):
        x = dense("logits", b.pointwise("gelu", "activation", dense("transform", x, 768)), 1)
        b.op("loss", "loss", "b s v -> b s", (x,), 6.0 * b.tensors[x].size)
    return b.graph()


def resnext101(batch: int) -> ModelGraph:
    """ResNeXt-101 32x4d: bottlenecks whose 3 x 3 convolution has 32 groups of channels (Xie et al. 2016, Table 1)."""
    def block(b: Builder, x: int, channels: int, stride: int, project: bool) -> int:
        shortcut = vision.unit(b, "shortcut", x, 4 * channels, 1, stride, relu=False) if project else x
        y = _grouped(b, vision.unit(b, "conv1", x, 2 * channels, 1), stride)
        y = b.pointwise("conv2_relu", "relu", vision.batch_norm(b, "conv2_bn", y))
        y = vision.unit(b, "conv3", y, 4 * channels, 1, relu=False)
        return b.pointwise("relu", "relu", b.add("residual", y, shortcut))

    return vision.residual(Builder("resnext-101", batch, optimizer="momentum"), (3, 4, 23, 3), block)


def _grouped(b: Builder, x: int, stride: int, groups: int = 32) -> int:
    """A 3 x 3 convolution in groups of channels."""
    _, height, width, channels = (int(extent) for extent in b.tensors[x].shape)
    each, out_y, out_x = channels // groups, -(-height // stride), -(-width // stride)
    x = b.op("groups", "wire", "b y x c -> b y x g e", (x,), 0.0, whole=("c", "g", "e"), sizes={"g": groups, "e": each})
    weight = b.parameter("conv2_w", "i j g e o", (3, 3, groups, each, each))
    flops = 2.0 * b.batch * out_y * out_x * channels * 9 * each
    x = b.op("conv2", "convolution", "b y x g e, i j g e o -> b p q g o", (x, weight), flops,
             whole=("y", "x", "i", "j", "p", "q"), sizes={"p": out_y, "q": out_x})
    return b.op("channels", "wire", "b p q g o -> b p q c", (x,), 0.0, whole=("c", "g", "o"), sizes={"c": channels})


def unet(batch: int) -> ModelGraph:
    """U-Net without padding (Ronneberger et al. 2015, Figure 1), by Adam."""
    b = Builder("u-net", batch, optimizer="adam")
    x = b.input("image", "b y x c", (batch, 572, 572, 1))
    skipped: List[int] = []

    def twice(name: str, y: int, channels: int) -> int:
        for number in range(2):
            with b.scope(f"{name}_conv{number}"):
                y = b.bias("bias", vision.convolution(b, "conv", y, channels, 3, same=False))
                y = b.pointwise("relu", "relu", y)
        return y

    def up(name: str, y: int, channels: int) -> int:
        """A transposed convolution of stride 2, beside what was skipped."""
        _, height, width, depth = (int(extent) for extent in b.tensors[y].shape)
        with b.scope(name):
            weight = b.parameter("w", "i j c o", (3, 3, depth, channels))
            flops = 18.0 * batch * height * width * depth * channels
            y = b.op("conv", "convolution", "b y x c, i j c o -> b p q o", (y, weight), flops,
                     whole=("y", "x", "i", "j", "p", "q"), sizes={"p": 2 * height, "q": 2 * width, "o": channels})
            y = b.pointwise("relu", "relu", b.bias("bias", y))
            return b.op("crop", "concat", "b y x c, b p q e -> b y x o", (y, skipped.pop()), 2 * b.tensors[y].size,
                        whole=("y", "x", "p", "q", "c", "e", "o"), sizes={"o": 2 * channels})

    for level, channels in enumerate((64, 128, 256, 512)):
        x = twice(f"down{level}", x, channels)
        skipped.append(x)
        with b.scope(f"pool{level}"):
            x = vision.pool(b, "pool", x, 2, 2, same=False)
    x = twice("bottom", x, 1024)
    with b.scope("dropout"):
        x = b.pointwise("dropout", "dropout", x, mask=True)
    for level, channels in enumerate((512, 256, 128, 64)):
        x = twice(f"level{level}", up(f"up{level}", x, channels), channels)
    with b.scope("head"):
        vision.class_loss(b, b.bias("bias", vision.convolution(b, "conv", x, 2, 1)))
    return b.graph()


# ---- points ----------------------------------------------------------------------------------------------------------------


def nvidia() -> List[Point]:
    """All runs."""
    return runs() + trained() + electras() + unets()


def runs() -> List[Point]:
    found: List[Point] = []
    for name, tokens, precision, where, batch, rates in RUNS:
        what = f"{name}{f' of {tokens} tokens' if tokens else ''}, {precision}, {where.split(':')[0]}"
        for gpus, (rate, micro_batches) in rates.items():
            size = batch * gpus
            model = bert_large(tokens, size) if tokens else (
                resnext101(size) if name == "resnext-101" else built_in_model(name, size))
            strategy = data_parallel(model, precision, True, gpus, micro_batches, bool(tokens) and precision == "fp16")
            found.append(Point("NVIDIA's examples", name, what, precision, gpus, rate, strategy, Cluster.parse(where), True,
                               container=CONTAINERS[TF2 if tokens else TF1]))
    return found


def trained() -> List[Point]:
    found: List[Point] = []
    for one in TRAINED:
        for place, precision in enumerate(("fp16", one.precision)):
            what = f"BERT-Large of {one.tokens} tokens, {precision}, {one.cluster.split(':')[0]}"
            for gpus, (counts, rates) in one.rates.items():
                rate, xla = rates[place], precision == "fp16" or one.xla
                if rate is not None:
                    model = bert_large(one.tokens, one.batches[place] * gpus)
                    strategy = data_parallel(model, precision, xla, gpus, counts[place], precision == "fp16")
                    found.append(Point(f"NVIDIA, {one.source}", "bert-large", what, precision, gpus, rate, strategy,
                                       Cluster.parse(one.cluster), xla, container=CONTAINERS[one.source]))
    return found


def electras() -> List[Point]:
    found: List[Point] = []
    for tokens, where, plain, batches, rates in ELECTRA:
        for place, precision in enumerate((plain, "fp16")):
            xla = tokens in PREDICTED or precision == "fp16"
            what = f"ELECTRA of {tokens} tokens, {precision}, {where.split(':')[0]}"
            for gpus, (both, counts) in rates.items():
                model = electra(tokens, batches[place] * gpus)
                strategy = data_parallel(model, precision, xla, gpus, counts[place], precision == "fp16")
                found.append(Point(f"NVIDIA, {TF2}", "electra", what, precision, gpus, both[place], strategy,
                                   Cluster.parse(where), xla, container=ELECTRAS_CONTAINER))
    return found


def unets() -> List[Point]:
    found: List[Point] = []
    for source, where, plain, batch, rates in UNET:
        for place, precision in enumerate((plain, "fp16")):
            what = f"U-Net, {batch} a GPU, {precision}, {where.split(':')[0]}"
            for gpus, both in rates.items():
                strategy = data_parallel(unet(batch * gpus), precision, True, gpus)
                found.append(Point(f"NVIDIA, {source}", "u-net", what, precision, gpus, both[place], strategy,
                                   Cluster.parse(where), True, container=CONTAINERS[source]))
    return found
