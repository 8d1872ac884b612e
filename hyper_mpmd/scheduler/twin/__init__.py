"""The slow, obvious Python twin of the native lowering and scheduling.

It is the specification: tests compare the native code with it record for record on random graphs, and an install
without a compiler plans and draws with it (`backend="python"`).
"""
