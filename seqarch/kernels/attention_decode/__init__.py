"""One new token against cached keys, whose number only the device knows."""
