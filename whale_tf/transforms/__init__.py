"""Ops -> ops with TensorFlow's NodeDefs, as the plan asks for it: nothing here edits the user's graph.

    precision, loss_scale, batch_norm   before the plan, which depends on types and bytes
    shard                               parts of ops and variables, for ``split`` and ZeRO
    lookups                             look-ups of values instead of handles
    recompute                           forward ops repeated in the backward pass
"""
