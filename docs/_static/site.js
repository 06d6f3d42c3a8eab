// What readers who do not see the page, or have no mouse, miss in the theme's pages.

function nameWhatHasNoName() {
  for (const heading of document.querySelectorAll('[role="heading"]:not([aria-level])')) {
    heading.ariaLevel = "2";
  }
  document.querySelector(".sidebar-drawer")?.setAttribute("aria-label", "All pages");
  document.querySelector(".toc-drawer")?.setAttribute("aria-label", "On this page");
}

// The Tab key reaches what scrolls sideways, and the arrow keys then scroll it.
function makeScrollableReachable() {
  const wide = ".content :is(pre, .table-wrapper, .cell_output, p:has(> img), figure)";
  for (const element of document.querySelectorAll(wide)) {
    if (element.scrollWidth > element.clientWidth) {
      element.tabIndex = 0;
    } else {
      element.removeAttribute("tabindex");
    }
  }
}

window.addEventListener("DOMContentLoaded", nameWhatHasNoName);
window.addEventListener("load", makeScrollableReachable);
window.addEventListener("resize", makeScrollableReachable);
