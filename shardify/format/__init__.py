"""The contract between the packages: names, tar bytes, index and manifest; standard library only."""
