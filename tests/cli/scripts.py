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

# Scripts as they are published, without a line of whale_tf and without shapes; each prints its losses and the sums of its
# variables.

HEAD = '''
import numpy as np
import tensorflow.compat.v1 as tf
tf.disable_eager_execution()
random = np.random.RandomState(0)

def weights(name, *shape):
    return tf.get_variable(name, initializer=np.float64(random.randn(*shape)) / 3)

def report(session):
    for variable in tf.trainable_variables():
        print("value", variable.op.name, repr(float(np.sum(session.run(variable) ** 2))))
'''

KEEP_PROB = HEAD + '''
x, y, keep_prob = tf.placeholder("float64"), tf.placeholder("float64"), tf.placeholder("float64")
images = tf.reshape(x, [-1, 4, 4, 1])
hidden = tf.nn.relu(tf.nn.conv2d(images, weights("filters", 3, 3, 1, 4), [1, 1, 1, 1], "SAME") + weights("bias", 4))
hidden = tf.nn.max_pool(hidden, [1, 2, 2, 1], [1, 2, 2, 1], "SAME")
hidden = tf.nn.dropout(tf.matmul(tf.reshape(hidden, [-1, 16]), weights("dense", 16, 6)), keep_prob)
logits = tf.matmul(hidden, weights("out", 6, 3)) + tf.matmul(x, weights("skip", 16, 3))
loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits_v2(logits=logits, labels=y))
accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1), tf.argmax(y, 1)), "float64"))
train = tf.train.AdamOptimizer(0.05).minimize(loss, tf.train.get_or_create_global_step())
with tf.train.MonitoredTrainingSession(hooks=[tf.train.StopAtStepHook(4)]) as session:
    while not session.should_stop():
        feed = {x: random.randn(8, 16), y: np.eye(3)[random.randint(0, 3, 8)]}
        print("value accuracy", repr(float(session.run(accuracy, {**feed, keep_prob: 1.0}))))
        print("value loss", repr(float(session.run([loss, train], {**feed, keep_prob: 1.0})[0])))
        if not session.should_stop():
            values = session.run(tf.trainable_variables())
    print("value variables", repr(float(sum(np.sum(value ** 2) for value in values))))
'''

HALVES = HEAD + '''
images, noise = tf.placeholder("float64", [None, 6]), tf.placeholder("float64", [None, 2])
labels = tf.placeholder("float64", [None])  # of the real and of the generated half
fake = tf.matmul(tf.nn.relu(tf.matmul(noise, weights("g1", 2, 5))), weights("g2", 5, 6))
both = tf.concat([images, fake], 0)
logits = tf.reshape(tf.matmul(tf.nn.relu(tf.matmul(both, weights("d1", 6, 5))), weights("d2", 5, 1)), [-1])
errors = tf.nn.sigmoid_cross_entropy_with_logits(logits=logits, labels=labels)
real, generated = tf.split(errors, 2)
d_loss, g_loss = tf.reduce_mean(errors), -tf.reduce_mean(generated) + 0.1 * tf.reduce_mean(real)
variables = tf.trainable_variables()
d_train = tf.train.AdamOptimizer(0.05).minimize(d_loss, var_list=variables[2:])
g_train = tf.train.AdamOptimizer(0.05).minimize(g_loss, var_list=variables[:2])
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    for step in range(3):
        count = 8 if step < 2 else 6
        halves = np.concatenate([random.uniform(0.8, 1, count), random.uniform(0, 0.2, count)])
        feed = {images: random.randn(count, 6), noise: random.randn(count, 2), labels: halves}
        print("value d_loss", repr(float(session.run([d_loss, d_train], feed)[0])))
        print("value g_loss", repr(float(session.run([g_loss, g_train], feed)[0])))
    report(session)
'''

PYTHON_INPUT = HEAD + '''
table = random.randn(20, 6)

def examples(numbers):
    return table[numbers], np.sign(table[numbers, :1])

numbers = tf.placeholder("int64", [None])
features, targets = tf.py_func(examples, [numbers], ["float64", "float64"])
hidden = tf.tanh(tf.matmul(features, weights("one", 6, 5)))
loss = tf.reduce_mean(tf.square(tf.matmul(hidden, weights("two", 5, 1)) - targets))
train = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    for step in range(4):
        print("value loss", repr(float(session.run([loss, train], {numbers: random.permutation(20)[:8]})[0])))
    report(session)
'''

PUBLISHED = {"keep_prob": KEEP_PROB, "halves": HALVES, "python_input": PYTHON_INPUT}
