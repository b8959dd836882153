"""Reference models as ordinary single-device TensorFlow graph code; none of them knows of parallelism.

Every model is a module with a frozen configuration dataclass (with named presets such as `BertConfig.large()`),
functions for its stages, `inputs(config, batch_size)` for placeholders, and `build(...)` which joins the stages.
"""
