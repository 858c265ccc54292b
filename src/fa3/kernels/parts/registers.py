"""How the registers of a block are shared out among its warpgroups."""

from fa3.spec import WARPGROUP_THREADS

#: (producer, consumer) registers of a thread for each number of consumer warpgroups, in steps of 8. A block
#: owns what its threads got at the launch (64 K over the threads, rounded down to 8 a thread), and what the
#: producer gives up is all that the consumers can gain: a larger demand waits forever.
REGISTERS = {1: (24, 240), 2: (24, 240), 3: (32, 160), 4: (32, 112)}
#: The same where the producer's other warps transpose v.
TRANSPOSING_REGISTERS = {1: (56, 240), 2: (40, 232), 3: (32, 160), 4: (32, 112)}
for _consumers, (_producer, _consumer) in (*REGISTERS.items(), *TRANSPOSING_REGISTERS.items()):
    _at_launch = min(65536 // (WARPGROUP_THREADS * (_consumers + 1)) // 8 * 8, 248)
    assert _producer + _consumers * _consumer <= (_consumers + 1) * _at_launch
