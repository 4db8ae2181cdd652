"""The dialect of LMI, the DJL containers' own."""
