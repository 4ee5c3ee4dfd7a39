// Lets readers change to another version's pages: `VERSIONS` is what ../versions.js says, newest first.
document.addEventListener("DOMContentLoaded", () => {
  const root = new URL(document.documentElement.dataset.content_root, location.href);
  const page = location.href.slice(root.href.length);

  const go = async (version) => {
    const home = new URL(`../${version}/index.html`, root).href;
    const same = new URL(`../${version}/${page}`, root).href;
    const found = await fetch(same, { method: "HEAD" }).then((answer) => answer.ok, () => false);
    location.href = found ? same : home;
  };

  const list = document.createElement("script");
  list.src = new URL("../versions.js", root).href;
  list.onload = () => {
    for (const select of document.querySelectorAll("select.versions")) {
      const here = select.value;
      select.replaceChildren(...VERSIONS.map((version) => new Option(version, version, false, version === here)));
      select.onchange = () => go(select.value);
    }
  };
  document.head.append(list);
});
