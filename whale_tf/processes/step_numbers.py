"""Numbers of a Session's steps with collectives, which TensorFlow takes from a sequence that the processes of a group share.

A sequence's name is a run option; by default it follows from the numbers of the graph's collectives.  That is not enough:

- Processes that run different parts of a step, in graphs with the same collectives, would number their steps alike.  When one
  of them ends its step, a device that takes part in both would drop what the other one's step still needs there.
- A step that fails, as at the end of the data, does not use up its number.  The next one would meet what remains of it in
  processes in which it has not failed yet.
"""

from __future__ import annotations

from typing import Any, Callable, Optional

from whale_tf._tf_compat import tf, v1


class StepNumbers:
    """Runs steps.

    Args:
        sequence: a positive number, which the processes of a group share, and no other group's.
        nothing: an op of this process that does nothing.
    """

    def __init__(self, sequence: int, nothing: tf.Operation) -> None:
        self._sequence, self._nothing = sequence, nothing
        self._has_failed = False

    def run(self, original: Callable, fetches: Any, feed_dict: Any = None, options: Optional[v1.RunOptions] = None,
            run_metadata: Optional[v1.RunMetadata] = None) -> Any:
        """Makes a step's run, with all arguments of ``original``, TensorFlow's own ``session.run``."""
        if self._has_failed:  # in all processes, which the same error or its consequence has reached
            original(self._nothing, options=self._options(None))
            self._has_failed = False
        try:
            return original(fetches, feed_dict, self._options(options), run_metadata)
        except tf.errors.OpError:
            self._has_failed = True
            raise

    def _options(self, given: Optional[v1.RunOptions]) -> v1.RunOptions:
        options = v1.RunOptions()
        if given is not None:
            options.CopyFrom(given)
        options.experimental.collective_graph_key = self._sequence
        return options
