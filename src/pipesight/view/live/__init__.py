"""A running training: its files are followed as they grow, and shown in the terminal and in browsers."""
