"""What a loaded program keeps: constants, arenas, named state, and who may use them now."""
