threads 4, 4
quiet
