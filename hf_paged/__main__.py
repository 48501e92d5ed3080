"""`python -m hf_paged`."""

from hf_paged.cli import main

if __name__ == "__main__":
    main()
