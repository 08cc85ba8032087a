"""Thresholds of the verdict: every limit of its rules, and of the numbers that the rules compare. Pure."""

# Limits of the rules.

# A cause counts if its saving is surely above this part of the step.
GAIN_MIN = 0.03
# NOT_NETWORK below this, if no cause counts: exposed communication and waiting, as a part of the step.
NETWORK_SHARE_MIN = 0.10
# A link is full from this on, for the rules of the link, of interfaces and of other traffic: its rate, over its speed.
LINK_UTILISATION = 0.80
# Above this, a stated rate of the link is wrong: rate over whole steps, over the link's. No burst lasts that long.
LINK_EXCEEDED = 1.05
# So is it above this, as a burst of a shaper is short: rate in transfer between hosts, over the link's.
LINK_EXCEEDED_AT_TIMES = 1.50
# Up to this it may be the burst of a shaper: what an operation moved beyond the link's rate, in seconds at that rate.
BURST_S = 0.02
# So it may from this on: rate over whole steps, over the link's, which then is in use most of the time.
LINK_USED = 0.90
# A burst is saved up in pauses of a link in use: rate over whole steps, over the link's, at least.
LINK_USED_IN_BURSTS = 0.50
# The transport rule applies to a probe from this on: rate of the probe, over the rate in transfer.
PROBE_RATIO = 1.30
# The latency rule applies surely above this: part of transfer time that does not depend on size.
LATENCY_SHARE = 0.50
# Operations of at most this many bytes, far below the link's rate, are latency without a fit.
SMALL_BYTES = 65_536
# So are at least this many a step: fewer are not cured by larger buckets.
SMALL_OPERATIONS_MIN = 16
# Larger buckets are advised from this number of operations of gradients a step on.
FUSED_OPERATIONS_MIN = 3
# Where the link's rate is not known, the rate that any link in use has at least, bits a second: Fast Ethernet.
SLOWEST_LINK_BPS = 100_000_000
# The host rule applies from this on: part of a machine's cores that its ranks keep busy over the whole step.
CORES_BUSY = 0.90
# The input rule applies from this on: time before forward passes, as a part of the step.
INPUT_SHARE = 0.10
# The optimizer rule applies from this on: time in the optimizer, as a part of the step.
OPTIMIZER_SHARE = 0.20
# The rule of other traffic applies from this on: bytes on an interface beyond the recorded ones, as a part of all.
OTHER_TRAFFIC = 0.20
# The rule of other traffic applies from this on: rate of these bytes, over the link's, or over SLOWEST_LINK_BPS.
OTHER_TRAFFIC_RATE = 0.05
# An interface of the stock path, unless that is gloo's, is known from this on: its bytes, over those between hosts.
INTERFACE_CARRIES = 0.5
# The configuration rule applies to buffers from this on: time in which they limit connections, over communication time.
BUFFER_SHARE = 0.20
# Rates are not judged if the error of the clocks exceeds this part of the transfer time.
CLOCK_SHARE = 0.20
# Fewest steps for a verdict, over all ranks.
STEPS_MIN = 5

# Limits of the numbers that the rules compare.

# No saving is predicted if the simulated step of the run as it was is off by more than this part of the measured one.
MISFIT_MAX = 0.20
# More than this multiple of a run's steps is not asked for: what they decide is too small.
LONGER_MAX = 10
# Fewest pairs of blocks that support a claim.
PAIRS_MIN = 3
# A gain over stock is withheld if our hooks surely slow stock, and by more than this part of the script's own step.
HANDICAP_MAX = 0.03
# Above this part of steps without an operation, beside others with some, the mean of all counts, not their middle.
SILENT_PART = 0.25
# The probe's best point is the one with the fewest streams that reaches this part of the top rate, as in a job.
PROBE_NEAR_BEST = 0.98
# The latency fit needs at least this many operations that ran alone on their rank.
FIT_OPERATIONS_MIN = 8
# The latency fit uses operations of a size of which at least this part ran alone.
FIT_ALONE_PART = 0.5
# The latency fit needs a largest operation of at least this many times the size of the smallest.
FIT_SIZES_RATIO_MIN = 2.0
# A rank is a persistent straggler only if chance makes a rank arrive this late with at most this probability.
CHANCE_MAX = 0.001
# Ranks that are last are stragglers only if their own work is longer by at least this part of the wait for them.
STRAGGLER_OWN = 0.5
# Below this part of the time that work takes longer, its rule tells that the step saves less: transfers hide behind it.
HIDDEN_LESS = 0.95
# Each of several stragglers is late by at least this part of the wait for the latest one.
STRAGGLER_LEAST = 0.5
# Fewest steps for the test of a persistent straggler.
STRAGGLER_STEPS_MIN = 7
# Fewest steps for imbalance: of fewer, the test may not tell a straggler from chance.
IMBALANCE_STEPS_MIN = 20
# Fewest delayed steps that support a claim about them: fewer are left out.
DELAYED_STEPS_MIN = 5
# Headers and acknowledgements add at most this part to the recorded bytes.
HEADERS = 0.10
# Each message of an operation adds at most this number of bytes beside: headers of small packets, control messages.
MESSAGE_BYTES = 512
# Readings of a host that cover less of the time of its steps than this part are named.
COVERED_MIN = 0.95
# Above this multiple of the least round trip, data wait in a queue of the network: a larger buffer only lengthens it.
QUEUE_RATIO = 2.0
# Packet loss is named from this share of sent segments on.
LOSS_SHARE = 0.01
# A step is delayed beyond this multiple of the distance from the 10th to the 25th percentile, above the latter.
DELAYED = 6.0
# A lost packet that is sent again after a timeout delays its step by at least this, ns: the least timeout of Linux.
TIMEOUT_NS = 200_000_000
# Packet loss is named from this number of sent segments on.
LOSS_SEGMENTS = 1000
# The link of one host is named as the slow one from this on: lowest rate between other hosts, over its highest.
SLOW_LINK_RATIO = 2.0
# So it is from this on: part of communication time in which its connections are busy.
SLOW_LINK_BUSY = 0.50
