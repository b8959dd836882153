"""Plan -> edits of the same tf.Graph, pass by pass (``rewrite.run`` is the list of passes)."""
