from .builder import Builder as Builder
