"""Program -> edits of the same tf.Graph (:func:`whale_tf.emit.emit.emit` is the list of steps)."""
