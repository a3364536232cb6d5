"""Networks: ordered lists of named blocks, and the one place where they meet a device."""
