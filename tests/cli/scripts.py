"""A training script, as text to be filled in."""

# whale: lines of whale_tf; batch: examples of a mini-batch, or None
SCRIPT = '''
import sys
import numpy as np
import tensorflow.compat.v1 as tf
{whale}
tf.disable_eager_execution()
with tf.Graph().as_default():
    x = tf.placeholder("float32", [{batch}, 6], name="x")
    for i in range(4):
        w = tf.get_variable("w%d" % i, initializer=np.random.RandomState(i).randn(6, 6).astype("float32") / 3)
        h = tf.tanh(tf.matmul(h if i else x, w), name="h%d" % i)
    loss = tf.reduce_mean(tf.square(h))
    train = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        batches = np.random.RandomState(0).randn(3, 8, 6).astype("float32")
        losses = [float(session.run([loss, train], {{x: batch}})[0]) for batch in batches]
    open(sys.argv[1], "w").write(repr(losses))
'''
