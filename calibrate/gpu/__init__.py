"""The real device: kernels under a timer, with torch and an NVIDIA GPU.

Everything but `detect` imports torch when it is imported. The tasks take their timers
and their torch device from outside, so that tests run them on a CPU.
"""
