"""What fits the library to the parts of a trainer that are not its own: one file a part, imported by its name."""
