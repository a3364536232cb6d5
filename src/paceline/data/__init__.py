"""Images: which one is next, where it lies, how it is read, changed and brought to the device."""
