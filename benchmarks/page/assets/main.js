// SPDX-License-Identifier: Apache-2.0
// Puts the page together: overview, one section per view, errors.
'use strict';

(() => {
  Report.data = JSON.parse(document.getElementById('data').textContent);
  const {files, rows, figures} = Report.data;
  const tagged = new Set(rows.filter((row) => row.tag).map((row) => row.file));
  const shortName = (name) => name.replace(/\.json(\.gz)?(?=$| · )/, '');

  // A source is a file, or where a file has tags, one tag of it.
  Report.source = (row) => {
    const name = shortName(files[row.file].name);
    return tagged.has(row.file) ? `${name} · ${row.tag || 'untagged'}` : name;
  };

  const facts = (file) => {
    const device = file.device;
    const list = [
      ['device', device.device_kind], ['cpu', device.cpu], ['cores', device.cores],
      ['memory', device.memory_gb && `${device.memory_gb} GiB`],
      ['gpu memory', device.gpu_memory_gb && `${device.gpu_memory_gb} GiB`], ['driver', device.driver],
      ['jax', device.jax], ['library', device.library], ['torch', device.torch], ['python', device.python],
      ['rows', `${file.rows}${file.errors ? `, ${file.errors} of them errors` : ''}`], ['runs', file.runs],
    ];
    if (file.ceilings) {
      const peaks = Object.entries(file.ceilings.gflops).map(([name, value]) => `${name} ${Report.number(value, 3)}`).join(', ');
      list.push(['ceilings', `GFLOP/s ${peaks}; read ${Report.number(file.ceilings.read_gb_s, 3)} GB/s (${file.ceilings.method})`]);
    } else {
      list.push(['ceilings', 'not measured']);
    }
    return list.filter(([, value]) => value !== undefined && value !== null && value !== '');
  };

  const overview = () => {
    const cards = files.map((file) => {
      const list = Report.element('dl');
      for (const [name, value] of facts(file)) list.append(Report.element('dt', {text: name}), Report.element('dd', {text: String(value)}));
      const card = Report.element('div', {class: 'card'}, Report.element('h3', {text: file.name}), list);
      if (file.problems.length) {
        card.append(Report.element('ul', {class: 'problems'}, ...file.problems.map((problem) => Report.element('li', {text: problem}))));
      }
      return card;
    });
    const tiles = figures.map((figure) => Report.element('div', {class: 'card'},
      Report.element('div', {class: 'tile-value'}, document.createTextNode(figure.value.toFixed(3))),
      Report.element('div', {class: 'tile-label', text: figure.label}),
      Report.element('div', {class: 'tile-detail', text: `${figure.detail}; ${shortName(figure.source)}`})));
    const root = Report.element('section', {id: 'overview'}, Report.element('h2', {text: 'What was measured'}),
      Report.element('div', {class: 'tiles files'}, ...cards));
    if (tiles.length) {
      root.append(Report.element('h2', {text: 'Key ratios', style: 'margin-top:28px'}),
        Report.element('p', {
          class: 'blurb', text: 'Geometric means of time ratios within one run and one precision; below 1 the first is faster.',
        }),
        Report.element('div', {class: 'tiles'}, ...tiles));
    }
    return {id: 'overview', title: 'Overview', root, draw: () => {}};
  };

  const failures = () => {
    const failed = rows.filter((row) => row.error !== undefined);
    if (!failed.length) return null;
    const columns = [
      {key: 'kind', title: 'kind', get: (row) => row.error_kind, format: String, text: true},
      {key: 'suite', title: 'suite', get: (row) => row.suite, format: String, text: true},
      ...Report.COLUMNS.filter((column) => ['source', 'impl'].includes(column.key)),
      {key: 'case', title: 'case', get: Report.describe, format: String, text: true},
      {key: 'error', title: 'reason', get: (row) => row.error, format: String, text: true, long: true},
    ];
    const root = Report.element('section', {id: 'errors'}, Report.element('h2', {text: 'Cases without numbers'}),
      Report.element('p', {class: 'blurb', text: 'Skipped, unsupported, out of memory, wrong or crashed: each with its reason.'}),
      Report.tableDetails(failed, columns, true));
    return {id: 'errors', title: `Errors (${failed.length})`, root, draw: () => {}};
  };

  const start = () => {
    const total = files.reduce((sum, file) => sum + file.rows, 0);
    document.getElementById('lead').textContent = `${total.toLocaleString('en')} rows from ${files.length} `
      + `${files.length === 1 ? 'file' : 'files'}. Times are medians over rounds of each round's median; `
      + 'whiskers run from quartile to quartile. '
      + 'Every number in a chart stands in the table below it.';
    const sections = [overview(), ...Report.views(rows), Report.beforeAfter(rows), failures()].filter(Boolean);
    const main = document.getElementById('main');
    for (const one of sections) {
      main.append(one.root);
      document.getElementById('sections').append(Report.element('a', {href: `#${one.id}`, text: one.title}));
    }
    main.append(Report.element('p', {
      class: 'page-foot',
      text: 'TFLOP/s count the pairs that the mask allows; GB/s count each array once. TF32 and true float32 products '
        + 'are different precisions and are named wherever both appear.',
    }));
    sections.forEach((one) => one.draw());
    let width = window.innerWidth;
    let waiting = 0;
    window.addEventListener('resize', () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => {
        if (window.innerWidth !== width) {
          width = window.innerWidth;
          sections.forEach((one) => one.draw());
        }
      }, 120);
    });
    // On paper a closed table would hide the numbers behind the charts.
    window.addEventListener('beforeprint', () => document.querySelectorAll('details').forEach((one) => one.setAttribute('open', '')));
    document.documentElement.setAttribute('data-ready', 'yes');
  };

  start();
})();
