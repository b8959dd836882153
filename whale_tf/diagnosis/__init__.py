"""Why a step is slow: what was measured beside the simulated step of the same Program, and what it costs.

    record     what each process measured of its steps, as a JSON file
    played     the Program with the measured times of its ops, played again after a change
    diagnose   the causes, the most expensive first, each with what it costs according to the simulator
    text       the answer in words
    traces     both steps as timelines
"""
