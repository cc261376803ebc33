"""Descriptions that ship with the service: YAML files, read by `layout_files.py`."""
