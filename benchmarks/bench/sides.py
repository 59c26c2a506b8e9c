"""The jobs of the benchmark: the sides of the pictures that come out, and the one in which nothing is decoded."""

SIDES = {"problem": 400, "crop": 224}
BYTES = "bytes"  # the pictures' files as they are: what reading alone does
JOBS = (*SIDES, BYTES)
