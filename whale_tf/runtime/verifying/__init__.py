"""The proof of a divided step: the local step runs beside it on the same mini-batch, and their numbers are compared.

    cut         which tensors both steps have, and which the local one takes from the divided one       pure
    compare     tolerances, and the differences                                                         pure
    local       the local step, in a graph and a Session of its own
    sessions    the first training run of a Session
    functions   the first call of a tf.function that trains
"""
