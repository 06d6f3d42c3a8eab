"""``chainermn launch``, to which no failure of a host is one in a row: it would be left out."""

from chainermn.__main__ import main
from chainermn.launch import membership

membership._LONG_RUN = 0.0

if __name__ == "__main__":
    main()
