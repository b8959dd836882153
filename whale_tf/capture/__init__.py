"""Records what happens to the user's graph: hooks, annotations, and the graph recorded as an op graph.

``hooks`` sees gradient calls and sessions, ``annotations`` keeps what was seen, ``record`` turns the graph into
:class:`whale_tf.ir.graph.OpGraph`; ``variables``, ``phases`` and ``task_graphs`` read only the recording.
"""
