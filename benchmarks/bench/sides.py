"""The two jobs of the benchmark, by the sides of the pictures that come out."""

SIDES = {"problem": 400, "crop": 224}
