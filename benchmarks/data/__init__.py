"""What a delivered picture costs, beside the loaders that people use: `make bench-data`."""
