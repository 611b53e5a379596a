"""One training step of one rank on fake tensors: its memory and its collectives.

step.py       runs a step of the engine on fake tensors and records it
fake_mesh.py  one rank of any mesh; tracks the memory of its tensors, operation by operation
"""
