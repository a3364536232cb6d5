"""From the index to micro-batches on the device."""
