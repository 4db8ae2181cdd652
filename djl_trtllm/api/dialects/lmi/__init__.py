"""LMI, the API of the DJL containers. `dialect` has the object, the other modules its parser and encoders."""
