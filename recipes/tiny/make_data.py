"""Makes the data that the small models are trained and tested on: see `data/make.py`."""

from data.make import main

if __name__ == "__main__":
    main()
