"""Data-parallel processes that train until the end of the data, epoch after epoch, as scripts of TensorFlow 1 do."""
from __future__ import annotations

import numpy as np
import tensorflow.compat.v1 as tf

import whale_tf as wh


def main() -> None:
    tf.disable_eager_execution()
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.set_random_seed(1)
    wh.init({"io.slicing": False})
    x = np.random.RandomState(0).randn(12, 3)
    iterator = tf.data.make_initializable_iterator(tf.data.Dataset.from_tensor_slices(x).batch(6))
    with wh.replicate():
        result = tf.matmul(iterator.get_next(), tf.get_variable("kernel", [3, 2], tf.float64))
        loss = tf.reduce_mean(tf.square(result - 1))
    update = tf.train.GradientDescentOptimizer(.1).minimize(loss)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        step = session.make_callable([loss, update])
        for epoch in range(6):
            session.run(iterator.initializer)
            while True:
                try:
                    value = session.run([loss, update])[0] if epoch % 2 else step()[0]
                except tf.errors.OutOfRangeError:
                    break
                print(f"[epoch {epoch}] {value:.12g}", flush=True)


if __name__ == "__main__":
    main()
