"""The store without a machine: commands and completions in, replies and transfers out."""
