"""The fast CPU backend: native code behind ctypes."""
