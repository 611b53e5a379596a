"""One training step on fake tensors, without other ranks: the memory it takes and what it sends.

step.py       a step of the engine on fake tensors, recorded
fake_mesh.py  one rank of any mesh; the memory of its tensors, operation by operation
"""
