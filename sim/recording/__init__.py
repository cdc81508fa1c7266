"""What the recorder is made of: rows, columns, totals, and their form on disk.

Nothing here grows with the number of steps: steps go out in batches of a fixed
length, to memory or to a file, and what the summary needs of them is reduced batch
by batch.
"""
