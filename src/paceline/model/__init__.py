"""Networks as ordered lists of named blocks, and how they run on a device."""
