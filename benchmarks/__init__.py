"""What the library costs, beside what its peers cost, by commands that anyone can run: ``make bench``."""
