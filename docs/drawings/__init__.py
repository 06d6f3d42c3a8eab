"""The drawings of the site, one module each; colours are those of the page (``site.css``)."""
