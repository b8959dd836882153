"""What runs in the user's process: when a graph is rewritten, and what Sessions, functions and feeds need afterwards.

    active          all global state
    triggers        what hooks call, which starts the main path, or the proof of its first step: Sessions, functions, data
    refusals        what is refused before that
    sessions        devices, merged fetches, equal copies
    functions       results of the whole mini-batch, and variables in their place (``variable_parts``)
    feeds           shapes that the graph leaves open, sizes that do not match
    of_graphs       what is known of graphs, and goes with them
    verifying       the local step beside the divided one
"""
